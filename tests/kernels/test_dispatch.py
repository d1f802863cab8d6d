"""The rule that picks an implementation."""

import pytest
import torch

from draftwood.kernels import dispatch


def test_a_tensor_on_the_cpu_takes_torch(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert dispatch.implementation(torch.zeros(1)) == "torch"


def test_the_environment_overrides_the_device_and_use_overrides_both(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.implementation(torch.zeros(1)) == "reference"
    with dispatch.use("torch"):
        assert dispatch.implementation(torch.zeros(1)) == "torch"
        with dispatch.use("reference"):
            assert dispatch.implementation(torch.zeros(1)) == "reference"
        assert dispatch.implementation(torch.zeros(1)) == "torch"
    assert dispatch.implementation(torch.zeros(1)) == "reference"


def test_use_ends_with_its_block_when_it_raises():
    with pytest.raises(KeyError), dispatch.use("reference"):
        raise KeyError
    assert dispatch.implementation(torch.zeros(1)) == "torch"


def test_an_unknown_name_is_refused_with_the_choices(monkeypatch):
    with pytest.raises(ValueError, match="'cuda'; the choices are reference, torch, triton"), dispatch.use("cuda"):
        pass
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(ValueError, match="DRAFTWOOD_KERNELS asks for the kernels 'fast'; the choices are"):
        dispatch.implementation(torch.zeros(1))


def test_triton_on_the_cpu_is_refused_outside_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with dispatch.use("triton"), pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        dispatch.implementation(torch.zeros(1))
