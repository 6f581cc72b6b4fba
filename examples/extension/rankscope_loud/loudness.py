"""What the verb computes."""

import time

import numpy as np
import torch
from torch import Tensor

from rankscope.models import InputsLike, ModelLike, as_inputs, as_model, prepare_planned
from rankscope.runs import RowWriter, Run
from rankscope.stream import SiteRef, SiteSelection, trace, undisturbed, view_of
from rankscope.surgery import SurgeryLike, as_surgery, operating_on
from rankscope.verbs import SiteReader, checked, floor_of, provenance_of
from rankscope.verdicts import Verdict
from rankscope_loud.declared import LOUDNESS


@checked(*LOUDNESS.options)
def loudness(
    model: ModelLike,
    inputs: InputsLike = None,
    surgery: SurgeryLike = None,
    *,
    louder: float = 1.0,
    progress: bool = False,
) -> Run:
    """Measure the mean length of the tokens that count after each block."""
    started = time.perf_counter()
    subject, given = as_model(model), as_inputs(inputs)
    loaded, plan = subject.loaded, given.plan(**LOUDNESS.inputs_defaults, seed=subject.seed)
    prepared = prepare_planned(loaded, given.data, plan)
    writer = RowWriter(coordinates=("ear",))
    reader = SiteReader((), plan.policy, writer)  # knows which tokens count, and remembers formats and lengths

    def observe(ref: SiteRef, x: Tensor) -> None:
        reader.note(ref, x)
        norms, valid = x.double().norm(dim=-1), reader.valid(x)
        counts = torch.ones_like(norms) if valid is None else valid.to(norms)
        values = louder * ((norms * counts).sum(-1) / counts.sum(-1)).numpy()
        writer.add(
            metric="token_norm",
            site=ref.site,
            stack=ref.stack,
            layer=ref.layer,
            first_sequence=reader.first_sequence,
            values=values,
            statuses=np.zeros(len(values), dtype=np.int8),
            head_axis=False,
            at={"ear": "left"},
        )

    with undisturbed(loaded.model):
        view = view_of(loaded.model, prepared[0], blocks=subject.blocks, stream=subject.declared_stream)
        changed = operating_on(loaded.model, as_surgery(surgery).operation, view=view)
        with changed, trace(view, SiteSelection.parse(["block.out"]), observe):
            for part in prepared:
                reader.start(part)
                part.run(loaded.model)
    table = writer.table()
    verdict = Verdict(f"Loud: tokens have length {table['value'].to_numpy().mean():.3g} on average.", (), "healthy")
    return Run(
        kind="loudness",
        provenance=provenance_of(loaded, prepared, reader, subject.seed, time.perf_counter() - started),
        floor=floor_of(reader.dtypes),
        table=table,
        **verdict.fields(),
    )
