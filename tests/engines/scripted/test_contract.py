"""The contract tests of every engine, those that do not ask for a distribution, against the scripted one.

The imported tests are collected here once more, with this folder's `server` and `reference`.
"""

from __future__ import annotations

from tests.engines.test_generation import (  # noqa: F401
    test_a_client_that_leaves_without_a_word_is_aborted,
    test_a_request_beyond_the_context_is_refused,
    test_a_stop_string_over_several_tokens_ends_the_answer,
    test_a_stop_token_ends_the_answer_and_is_its_last_id,
    test_abort_ends_a_request_with_what_it_has,
    test_an_abort_does_not_reach_requests_whose_id_begins_alike,
    test_cancelling_a_waiting_call_frees_the_engine,
    test_closing_the_iterator_frees_the_engine,
    test_concurrent_requests_of_different_lengths_do_not_disturb_each_other,
    test_greedy_answers_are_those_of_transformers,
    test_streaming_gives_the_same_tokens_in_many_chunks,
    test_the_wire_is_sglangs,
    test_values_out_of_range_are_refused,
)
from tests.engines.test_weights import (  # noqa: F401
    test_a_failing_update_keeps_the_old_weights,
    test_a_swap_during_a_request_splits_its_spans,
    test_abort_mode_ends_requests_with_what_they_have,
    test_after_a_swap_new_requests_are_wholly_of_the_new_weights,
    test_labelling_keeps_requests_and_splits_their_spans,
)
