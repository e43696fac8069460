"""The pretended device refuses what an accelerator refuses, and sees what makes a host wait."""

import pytest
import torch
from torch import nn

from tests.devices.pretended import WrongDeviceError, counting


def test_values_and_gradients_are_those_of_the_cpu(device):
    torch.manual_seed(0)
    layer, x_23 = nn.Linear(3, 4), torch.randn(2, 3)
    layer(x_23).tanh().sum().backward()
    wanted = layer.weight.grad.clone()
    layer.zero_grad()
    layer.to(device)
    layer(x_23.to(device)).tanh().sum().backward()
    assert layer.weight.device == layer.weight.grad.device == device
    assert torch.equal(layer.weight.grad.cpu(), wanted)


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: here @ there,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: torch.where(here > 0, here, there),
        lambda here, there: there[here.long()],
    ],
)
def test_host_and_device_do_not_mix(device, mix):
    with pytest.raises(WrongDeviceError):
        mix(torch.ones(3, 3, device=device), torch.ones(3, 3))


def test_what_a_device_takes_from_the_host(device):
    x_3 = torch.arange(3.0, device=device)
    assert (x_3 * torch.tensor(2.0)).tolist() == [0, 2, 4]
    assert x_3[torch.tensor([2, 0])].tolist() == [2, 0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.ones(3).to(x.device),
    ],
)
def test_waits_are_seen(device, ask):
    x_3 = torch.arange(3.0, device=device)
    with counting() as waits:
        ask(x_3)
    assert len(waits) == 1


@pytest.mark.parametrize(
    "quiet",
    [
        lambda x: torch.zeros(3, device=x.device),
        lambda x: torch.ones(3).to(x.device, non_blocking=True),
        lambda x: x.masked_fill(x > 0, 1.0).softmax(-1).cumsum(-1),
        lambda x: x.index_select(0, torch.zeros(1, dtype=torch.long, device=x.device)),
    ],
)
def test_what_is_queued_is_no_wait(device, quiet):
    x_3 = torch.arange(3.0, device=device)
    with counting() as waits:
        quiet(x_3)
    assert waits == []
