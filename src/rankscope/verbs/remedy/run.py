"""``remedy``: what would each known remedy do to the tokens of this model?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from rankscope.errors import InputError
from rankscope.execution.passes import executing
from rankscope.models.inputs import InputsLike, as_inputs, prepare_planned
from rankscope.models.loading import load_initialised_twin
from rankscope.models.model import ModelLike, as_model
from rankscope.models.view import ModelView
from rankscope.remedies import REMEDIES, Arrangement, arrangement_of, evidence_for
from rankscope.runs.run import Run
from rankscope.stream.viewing import need_plain_stream
from rankscope.surgery.session import operations_on
from rankscope.surgery.surgery import SurgeryLike
from rankscope.verbs.calling import checked
from rankscope.verbs.origin import floor_of, in_context, provenance_of
from rankscope.verbs.remedy import EXECUTION, OWN, REMEDY
from rankscope.verbs.remedy.judge import NONE, judge_remedies, ranked
from rankscope.verbs.remedy.trial import Trial, parsed_remedy


@checked(*OWN)
def remedy(
    model: ModelLike,
    inputs: InputsLike = None,
    surgery: SurgeryLike = None,
    *,
    remedies: Sequence[str] | str | None = None,
    weights: Literal["given", "init"] = "given",
    gradients: bool = True,
    progress: bool = False,
) -> Run:
    """Apply each remedy to a model in turn, measure every block, and rank the remedies.

    Remedies that rescued trainings of small networks with such norms and skips come first; those that were tried and
    rescued none come last. Within each group they are ranked by the relative residual after the last block: how far
    tokens stay apart on these weights. This model is not trained.

    Args:
        model: a :class:`rankscope.Model`, a spec or your own module, which is left unchanged.
        inputs: :class:`rankscope.Inputs`, or what is accepted in their place; see ``measure``. Four sequences of 64
            tokens are read from a file or the sample text.
        surgery: :class:`rankscope.Surgery` under which the model runs, or a dictionary of its fields; None for none.
            ``{"skip": 0}`` applies the remedies to the network without its skips.
        remedies: names from ``rankscope ls remedies``, each as ``NAME`` or ``NAME=STRENGTH``; None for all.
        weights: ``"given"``, or ``"init"`` for a random initialisation of the same architecture.
        gradients: also compare the gradients of query and key weights with those of value weights. With
            ``Model(parallel="data")`` only the first process measures gradients.
        progress: show a progress bar.

    Returns:
        Rows as in ``measure`` with the further column ``remedy`` (``none`` among them), and in ``extra["remedies"]``
        one entry per remedy, best first. Remedies that the model does not support are left out and listed in the notes.

    Example:
        >>> from rankscope import Inputs
        >>> run = remedy("init:tiny-bert", Inputs(sequences=2, tokens=16), remedies=["residual_scale"])
        >>> sorted(entry["name"] for entry in run.extra["remedies"])
        ['none', 'residual_scale']
    """
    started = time.perf_counter()
    subject, given = as_model(model), as_inputs(inputs)
    plan = given.plan(**REMEDY.inputs_defaults, seed=subject.seed)
    wanted = [parsed_remedy(word) for word in remedies or REMEDIES]
    with executing(EXECUTION, subject, surgery, progress=progress) as execution:
        loaded = execution.loaded
        if weights == "init" and loaded.origin != "init":
            loaded = load_initialised_twin(loaded, seed=subject.seed)
        prepared = prepare_planned(loaded, given.data, plan)
        view = execution.plan(prepared, model=loaded.model, reads_weights=True)
        need_plain_stream(view, "remedy")
        trial = Trial(loaded, view, prepared, plan.policy, plan.seed)
        arms = trial.arms(wanted)
        trial.run(arms, execution)
        if gradients:
            trial.compare_gradients(arms, execution)
        done = [arm for arm in arms if not arm.refused]
        if not any(arm.name != NONE for arm in done):
            raise InputError("None of the remedies could be applied. " + " ".join(trial.notes))
        table = trial.writer.table()
        seen = evidence_for(_arrangement(view), ["token_collapse"])
        entries = ranked(table, [arm.facts(seen) for arm in done])
        floor = floor_of(trial.reader.dtypes)
        verdict = judge_remedies(entries, prepared.sequences, is_random=loaded.origin == "init")
        seconds = time.perf_counter() - started
        run = Run(
            kind="remedy",
            provenance=provenance_of(loaded, prepared, trial.reader, subject.seed, seconds, subject.declared_stream),
            floor=floor,
            **verdict.fields(),
            table=table,
            notes=(*loaded.notes, *prepared.notes, *trial.notes),
            extra={"remedies": entries, **execution.described},
        )
        return in_context(run, prepared)


def _arrangement(view: ModelView) -> Arrangement | None:
    """How norms and skips are arranged in the network as it runs now; None where that is not known."""
    surgery = operations_on(view.model)
    if surgery == ({"attention_skip": 0.0, "mlp_skip": 0.0},):
        return "no skips"
    return None if surgery else arrangement_of(view)
