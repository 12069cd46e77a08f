"""FedDF: fusion by ensemble distillation (Algorithm 3; Algorithm 1 is its case of one prototype)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

from feddf.fusion.average import average_by_prototype
from feddf.fusion.distill import Students, notes
from feddf.fusion.ensemble import MakeTargets
from feddf.types import Fused, Fusion, Rule, ServerState, State, Update

ENSEMBLE = "ensemble"  # what it is called in the server's memory

Candidates = Callable[[State, State], Sequence[State]]
"""(previous weights, averaged weights) -> the weights that a student may start from."""


def from_average(previous: State, averaged: State) -> Sequence[State]:
    """Start from the average: the paper's way."""
    return (averaged,)


def from_previous(previous: State, averaged: State) -> Sequence[State]:
    """Start from the last round's model (Table 5)."""
    return (previous,)


def from_best(previous: State, averaged: State) -> Sequence[State]:
    """Start from the better of both, by the score that students are stopped by."""
    return (averaged, previous)


def feddf(average: Rule, ensemble: MakeTargets, students: Students, candidates: Candidates = from_average) -> Fusion:
    """Return the fusion of Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion" (2020).

    The weights of each prototype's clients are averaged; then each prototype is distilled, on the unlabeled
    pool, from the ensemble of *all* clients, whatever their architecture. A prototype none of whose clients
    took part learns from the others too, starting from its previous weights.

    Args:
        average: how the weights of one prototype's clients are averaged (:func:`feddf.fusion.average.average`).
        ensemble: how all clients teach together (:func:`feddf.fusion.ensemble.make_ensemble`).
        students: how students learn from that (:func:`feddf.fusion.distill.make_students`).
        candidates: which weights a student may start from.
    """

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        began = perf_counter()
        averaged = average_by_prototype(average, server, updates)  # lines 9 to 11
        taught = ensemble(updates, seed, server.memory.get(ENSEMBLE, {}))  # line 14, of all teachers
        asked = perf_counter()
        starts = {name: candidates(server.models[name], state) for name, state in averaged.items()}
        learned = students(starts, taught.targets, seed)  # lines 12 to 15
        seconds = {"ask": asked - began, "distill": perf_counter() - asked}
        models = {name: learned[name].state for name in averaged}
        after = replace(server.next(models), memory={ENSEMBLE: taught.memory} if taught.memory else {})
        note = {"seconds": seconds, "distillation": notes(learned)}
        return Fused(after, averaged, note, taught.ensemble, taught.why)

    return fuse
