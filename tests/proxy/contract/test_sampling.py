from __future__ import annotations

import pytest

from proxy.contract.turn import Constraint, ConstraintKind, LogprobConvention, SamplingParameters

CONSTRAINT = Constraint(kind=ConstraintKind.REGEX, text="a")


@pytest.mark.parametrize(
    ("sampling", "convention"),
    [
        (SamplingParameters(max_new_tokens=1, temperature=0.3, seed=3), LogprobConvention.SAMPLED),
        (SamplingParameters(max_new_tokens=1, presence_penalty=1.0), LogprobConvention.ADJUSTED),
        (SamplingParameters(max_new_tokens=1, frequency_penalty=-0.5), LogprobConvention.ADJUSTED),
        (SamplingParameters(max_new_tokens=1, logit_bias={"3": -100.0}), LogprobConvention.ADJUSTED),
        (SamplingParameters(max_new_tokens=1, presence_penalty=1.0, top_k=3), LogprobConvention.UNTRUNCATED),
        (SamplingParameters(max_new_tokens=1, top_p=0.9), LogprobConvention.UNTRUNCATED),
        (SamplingParameters(max_new_tokens=1, top_k=3), LogprobConvention.UNTRUNCATED),
        (SamplingParameters(max_new_tokens=1, min_p=0.1), LogprobConvention.UNTRUNCATED),
        (SamplingParameters(max_new_tokens=1, constraint=CONSTRAINT), LogprobConvention.CONSTRAINED),
        (
            SamplingParameters(max_new_tokens=1, constraint=CONSTRAINT, logit_bias={"3": 1.0}),
            LogprobConvention.CONSTRAINED,
        ),
        (SamplingParameters(max_new_tokens=1, constraint=CONSTRAINT, top_p=0.9), LogprobConvention.UNTRUNCATED),
    ],
)
def test_sampling_reports_the_distribution_of_its_log_probabilities(
    sampling: SamplingParameters, convention: LogprobConvention
) -> None:
    assert sampling.logprob_convention is convention
