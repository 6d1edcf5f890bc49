"""The cause that lies in the batches themselves: texts padded to the longest among them."""

from __future__ import annotations

from common.analysis.step_parts import flags
from common.diagnose.causes.sharing import compute_share
from common.diagnose.evidence.case import Case, Verdict, confidence, percent
from common.diagnose.evidence.evidence import PROBES, STEP, STEPS, standard_error
from common.diagnose.evidence.measured_step import pass_times

PADDING_SHARE = 0.10
"""Share of the step that computing padding must take. Texts sorted by length still have some."""


def padding(case: Case) -> Verdict | None:
    """Judges whether much of the step is computation of padding, which no text needs.

    What padding takes is less than its share of the tokens: a pass has a part that does not grow
    with its batch. Attention, which grows with the square of the length, is not counted in.
    """
    counted = case.run.measured.groupby(STEP)[["tokens", "padded_tokens"]].sum()
    if not counted["padded_tokens"].sum():
        return None
    share = 1 - float(counted["tokens"].sum() / counted["padded_tokens"].sum())
    if share < PADDING_SHARE:
        return None
    [probes] = case.run.need(PROBES)
    several, batch = probes[flags(probes["together"])], case.run.batch_per_rank
    passes = pass_times(several)
    growing = (passes.forward.per_sample_s + passes.backward.per_sample_s) * batch
    growing /= passes.time_s(batch)
    computing = compute_share(case)
    lost = computing * growing * share
    if lost < PADDING_SHARE:
        return None
    by_step = 1 - counted["tokens"] / counted["padded_tokens"]
    error = computing * growing * standard_error(by_step)
    level, reason = confidence(lost, PADDING_SHARE, error, len(by_step))
    if several["batch_per_rank"].nunique() == 1:
        level, reason = "low", "how much of a pass grows with its batch is not known"
    tokens, padded = counted["tokens"].mean(), counted["padded_tokens"].mean()
    return Verdict(
        cause="padding",
        title=f"{percent(share)} of the tokens are padding",
        evidence=(
            f"Of {padded:,.0f} tokens that a step computes, {tokens:,.0f} are texts' own "
            f"{case.file(STEPS)}.",
            f"{percent(growing)} of a pass grows with its batch {case.file(PROBES)}, and passes "
            f"take {percent(computing)} of the step {case.file(STEPS)}.",
        ),
        lost_share=lost,
        confidence=level,
        reason=f"share of the step: {reason}",
        change=(
            "Put texts of like length into one batch (sort them, or sample from buckets of "
            "lengths) and pad to its longest, or pack several texts into one row. That saves as "
            "much on any number of ranks."
        ),
        speedup_now=case.speedup_now,
        predicted_speedup=case.speedup_without(lost),
    )
