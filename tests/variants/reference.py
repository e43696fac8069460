"""Training-time chains, one root after the other, in plain autograd: no shared context, no chunks, no recomputation."""

import torch


def chain_states(module, batch, lengths, steps, *, detach):
    """states[step][b, slot]: step ``step`` of every root whose step lies in its segment, and likewise labels: the
    token that the state's logits are for, where the segment has it.

    Root ``r`` attends to the target-derived keys of rows ``<= r`` and to its own of steps 1 to ``step``.
    """
    network, target = module.network, module.target
    states, labels = [{} for _ in range(steps)], [{} for _ in range(steps)]
    for b, row in enumerate(lengths):
        slot = start = 0
        for n in row:
            ids = batch.tokens_BS[b : b + 1, start : start + n]
            streams = target.features(ids, module.taps)
            fused = network.fuse(torch.cat([streams[tap] for tap in module.taps], -1)[:, :-1])
            embedded = target.embed(ids[:, 1:])
            k, v = network.keys(fused, embedded, torch.arange(n - 1)[None])
            for root in range(n - 1):
                keys, values = [k[:, :, :root]], [v[:, :, :root]]

                def attend(q, k, v, keys=keys, values=values):
                    keys.append(k)
                    values.append(v)
                    repeat = q.shape[1] // k.shape[1]
                    all_k = torch.cat(keys, 2).repeat_interleave(repeat, 1)
                    all_v = torch.cat(values, 2).repeat_interleave(repeat, 1)
                    return (q @ all_k.mT * q.shape[-1] ** -0.5).softmax(-1) @ all_v

                state = fused[:, root : root + 1]
                for step in range(min(steps, n - 1 - root)):
                    if step and detach:
                        state = state.detach()
                    token, position = embedded[:, root + step : root + step + 1], torch.tensor([[root + step]])
                    state = network(state, token, position, attend)
                    states[step][b, slot + root] = state[0, 0]
                    if root + step + 2 < n:
                        labels[step][b, slot + root] = ids[0, root + step + 2]
            slot, start = slot + n - 1, start + n
    return states, labels


def gradients(network, loss):
    parameters = [p for p in network.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def assert_same_gradients(ours, expected, rel=1e-5):
    for one, other in zip(ours, expected, strict=True):
        assert other.abs().max() > 0
        assert (one - other).abs().max() < rel * other.abs().max()
