"""Which channels a client knows: the part of a method by which clients tell it with their updates.

A site may have labels for some of the channels only. As a teacher it then says nothing of the others
(:func:`feddf.fusion.ensemble.knowing`). That a client knows all channels cannot be refuted: it counts as an ordinary
client does, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from feddf import types as t
from feddf.evaluate import Teacher
from feddf.outputs import Outputs

KNOWN_CHANNELS = "known channels"  # what the mask is called in a payload, and in the server's memory


def known_channels(resources: t.Resources) -> t.Part:
    """Return the part of a method whose clients know different channels."""
    checked = partial(complaint, outputs=resources.outputs)
    return t.Part(half=tell, fuse=remember, form=partial(form, channels=resources.outputs.channels), complaint=checked)


def tell(model: nn.Module, training: t.Training) -> t.Steps:
    """Tell the server which channels the client's labels tell apart."""
    known = training.job.client.known
    mask = torch.ones(training.outputs.channels or 0) if known is None else known
    return t.Steps(finish=lambda: t.Sent(payload={KNOWN_CHANNELS: {"mask": mask.to(torch.uint8)}}))


def form(job: t.Job, *, channels: int | None) -> t.Form:
    """Ask for a 0 or 1 for each channel."""
    return {KNOWN_CHANNELS: {"mask": t.TensorForm((channels,), torch.uint8, 0, 1)}}


def complaint(reply: t.Reply, *, outputs: Outputs) -> str | None:
    """Return what is wrong with the channels that a client says it knows."""
    known = reply.payload[KNOWN_CHANNELS]["mask"].nonzero().flatten().tolist()
    background = outputs.options.get("background")
    if background is not None and background not in known:
        return f"it says that it does not know channel {background}, the background, beside which all others are told"
    return None if set(known) - {background} else "it says that it knows no channel, so it has nothing to teach"


def told(client: t.Update | Teacher) -> Tensor | None:
    """Return the mask of the channels that a client knows, if it told."""
    return client.payload[KNOWN_CHANNELS]["mask"].bool() if KNOWN_CHANNELS in client.payload else None


def remember(inner: t.Fusion) -> t.Fusion:
    """Return ``inner`` for clients that know what they knew before: one that says something else is refused."""

    def fuse(server: t.ServerState, updates: Sequence[t.Update], seed: int) -> t.Fused:
        before = server.memory.get(KNOWN_CHANNELS, {}).get("clients", {})
        now = {update.client_id: update.payload[KNOWN_CHANNELS]["mask"] for update in updates}
        said = {id: f"it says that it knows {_listed(mask)}, and it said" for id, mask in now.items()}
        changed = [id for id, mask in now.items() if not mask.equal(before.get(id, mask))]
        if changed:
            raise t.Refusal([t.Failure(id, f"{said[id]} {_listed(before[id])} before") for id in changed])
        fused = inner(server, updates, seed)
        memory = {**fused.server.memory, KNOWN_CHANNELS: {"clients": {**before, **now}}}
        return replace(fused, server=replace(fused.server, memory=memory))

    return fuse


def _listed(mask: Tensor) -> str:
    return f"channels {', '.join(map(str, mask.nonzero().flatten().tolist()))}"[:100]
