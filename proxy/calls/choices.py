"""Plan the answers of a call, one for every choice of every prompt."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from proxy.calls.call import ModelCall
from proxy.calls.capture import CallPlan
from proxy.calls.constraints import AnswerConstraints, PromisedAnswer
from proxy.calls.prompts import PlannedPrompt
from proxy.calls.sampling import for_choice, resolve_sampling
from proxy.clock import Clock
from proxy.contract.identifiers import new_turn_id
from proxy.runs.service import RunView
from proxy.sessions.identification import SessionContext
from proxy.tokens.output import OutputFormat
from proxy.tokens.template import ChatTemplate


class ChoicePlanner:
    """Plans the answers of one model, by the format in which it writes tool calls and reasoning."""

    def __init__(self, template: ChatTemplate, output: OutputFormat, clock: Clock) -> None:
        self._template = template
        self._output = output
        self._clock = clock
        self._constraints = AnswerConstraints(template)

    @property
    def reads_calls(self) -> bool:
        """Whether tool calls are recognised in the model's answers."""
        return self._output.tool_format is not None

    def read_as(self, call: ModelCall) -> OutputFormat:
        """Return the format of the answers. Raw completions are never parsed for tool calls or reasoning."""
        return OutputFormat() if call.prompts else self._output

    def promised(self, call: ModelCall) -> PromisedAnswer | None:
        """Return the form that the call's answers must have. Raise UnsupportedParameter if it cannot be enforced."""
        return self._constraints.of(call, self.read_as(call))

    def plans(
        self,
        call: ModelCall,
        run: RunView,
        session: SessionContext,
        prompts: Sequence[PlannedPrompt],
        promised: PromisedAnswer | None,
    ) -> list[CallPlan]:
        """Return one plan for every choice, those of the first prompt first."""
        now = self._clock()
        one_call = call.calls_allowed and (not call.parallel_calls or self._template.single_calls)
        call_end = self._output.call_end if one_call else None
        samplings = [
            resolve_sampling(
                call.sampling,
                run=run.settings,
                purpose=session.purpose,
                template=self._template,
                prompt_tokens=len(prompt.plan.input_ids),
                prompt_param="prompt" if call.prompts else "messages",
                call_end=call_end,
            )
            for prompt in prompts
        ]
        # For each prompt and not for each choice: choices share their prompt, and reading its end takes time.
        in_reasoning = [self._begins_inside_thought(call, prompt) for prompt in prompts]
        if promised is not None:
            samplings = [
                msgspec.structs.replace(sampling, constraint=promised.constraint(in_reasoning=begun))
                for sampling, begun in zip(samplings, in_reasoning, strict=True)
            ]
        return [
            CallPlan(
                turn_id=new_turn_id(),
                session_id=session.id,
                run_id=run.id,
                call=call,
                prompt=prompts[index // call.n],
                sampling=for_choice(samplings[index // call.n], index % call.n),
                started_at=now,
                choice=index,
                in_reasoning=in_reasoning[index // call.n],
                one_call=one_call,
                watched=one_call and call_end is None and self.reads_calls,
            )
            for index in range(len(prompts) * call.n)
        ]

    def _begins_inside_thought(self, call: ModelCall, prompt: PlannedPrompt) -> bool:
        output = self.read_as(call)
        if not output.reasoning or not (call.prefill or self._template.may_end_in_thought(prompt.plan.input_ids)):
            return False
        tail = self._template.tail_text(prompt.plan.input_ids, margin=len(call.prefill)).removesuffix(call.prefill)
        return output.begins_inside_thought(tail, call.prefill)
