"""What a call asks for, and the warnings of its answer."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.calls.call import ModelCall
from proxy.calls.capture import CallPlan
from proxy.calls.constraints import PromisedAnswer
from proxy.calls.conversation import ReadConversation
from proxy.calls.raw_prompts import ReadPrompts
from proxy.calls.recording import CallContext
from proxy.calls.runtime import ModelRuntime
from proxy.calls.sampling import changes

_ENDED = "the session has ended: this call is recorded in it and not trained"


def understood(
    call: ModelCall, runtime: ModelRuntime
) -> tuple[PromisedAnswer | None, ReadConversation | ReadPrompts]:
    """Return the form that the answer must have, and the conversation or the prompts that it is to continue."""
    promised = runtime.choices.promised(call)
    return promised, runtime.raw_prompts.read(call) if call.prompts else runtime.prompts.read(call)


def call_warnings(call: ModelCall, context: CallContext, plans: Sequence[CallPlan]) -> tuple[str, ...]:
    """Name every change of the call's sampling, each once, and say if its session has ended."""
    run = context.served.run.settings
    changed = [change for plan in plans[:: call.n] for change in changes(call.sampling, plan.sampling, run)]
    return tuple(dict.fromkeys((_ENDED, *changed) if context.session.has_ended else changed))
