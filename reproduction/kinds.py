"""Sites that know different classes: the same teachers, combined by conditional probabilities and in the naive way.

python -m reproduction.kinds 0 1 2
"""

from __future__ import annotations

import json
import sys
from functools import partial

from feddf.client import local_update
from feddf.config import load
from feddf.engines.open import open_engines
from feddf.evaluate import Evaluation, Predictions, accuracy_of, teacher_of
from feddf.fusion.ensemble import Ensemble, avg_logits, avg_probabilities, knowing
from feddf.fusion.knowledge import tell, told
from feddf.outputs import classes
from feddf.rounds import jobs_for
from feddf.runs.build import build
from feddf.types import Reply, Update


def compare(seed: int) -> dict[str, float]:
    """Return the test score of every site of the preset digit-scenes, and of both ways to combine them."""
    parts = build(load("digit-scenes", [f"seed={seed}"]))
    test, prototypes = parts.task.data.test, parts.prototypes
    outputs = test.outputs
    naive = classes(outputs.channels, outputs.positions)  # the background is one more class, which everybody knows
    train = partial(
        local_update, prototypes=prototypes, train=parts.task.train, local=parts.experiment.local, half=tell
    )
    with open_engines(parts.experiment.run) as engines:
        jobs = jobs_for(parts.server, parts.federation, parts.federation.clients)
        replies = [one for one in engines.clients(train, jobs) if isinstance(one, Reply)]
        updates = [
            Update(one.client_id, one.prototype, 1, one.state, one.n_examples, {}, one.payload) for one in replies
        ]
        asked = tuple(teacher_of(one, prototypes) for one in sorted(updates, key=lambda one: one.client_id))
        found = [one for one in Evaluation(engines.server, test.inputs)(asked) if isinstance(one, Predictions)]
    known = {one.client_id: mask for one in updates if (mask := told(one)) is not None}
    scores = {
        one.client_id: accuracy_of(outputs.restrict(one.logits, known[one.client_id]), test.labels, outputs)
        for one in found
    }
    # both see the teachers' answers among what they know: they differ in what becomes of the background
    merged = [Predictions(one.client_id, outputs.restrict(one.logits, known[one.client_id])) for one in found]
    for combine in (avg_logits, avg_probabilities):
        for name, meaning in (("conditional", outputs), ("naive", naive)):
            target = knowing(Ensemble(asked, combine, outputs=meaning))(merged)
            scores[f"{name}, {combine.__name__}"] = accuracy_of(outputs.raw(target.double()), test.labels, outputs)
    return scores


if __name__ == "__main__":
    for word in sys.argv[1:] or ["0"]:
        print(json.dumps({"seed": int(word), **{name: round(one, 4) for name, one in compare(int(word)).items()}}))
