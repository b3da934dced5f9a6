"""Files of weights: what is read of them, and how published ones fit our encoders."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from tests.architecture.test_published import reference_resnet
from tests.checkpoint.published import VGG, Tensors, resnet, vgg, wide_resnet
from tests.law.cases import relative
from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import Pretrainable
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.resnet import BLOCKS
from tiledseg.architecture.segnet import SegNet
from tiledseg.checkpoint.loading import load_pretrained, read_state_dict, strip_prefixes, widened
from tiledseg.errors import CheckpointError
from tiledseg.inference.trained import fill
from tiledseg.models.network import GraphNetwork, build_modules

STATE = {"conv1.weight": torch.arange(6.0).view(1, 6, 1, 1), "bn1.num_batches_tracked": torch.tensor(3)}


def _same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in STATE)


def test_each_format_gives_the_same_tensors(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    torch.save(STATE, tmp_path / "b.pth")
    torch.save(STATE, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state_dict": STATE}, tmp_path / "c.pth")
    torch.save({"model": STATE, "optimizer": {"lr": 0.1}}, tmp_path / "d.bin")
    assert all(_same(read_state_dict(path)) for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 5


class _Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit(9)",))


def test_what_is_no_state_dict_is_refused_in_one_line(tmp_path: Path) -> None:
    whole, cut, text, harmful, other, empty, nested = (tmp_path / name for name in "abcdefg")
    torch.save(STATE, whole)
    cut.write_bytes(whole.read_bytes()[:-100])
    text.write_text("no weights at all")
    harmful.write_bytes(pickle.dumps({"a": _Harmful()}, protocol=2))
    torch.save([1, 2], other)
    empty.write_bytes(b"")
    torch.save({"a": {"b": STATE}}, nested)
    for path in (cut, text, harmful, other, empty, nested, tmp_path / "missing", tmp_path):
        with pytest.raises(CheckpointError, match=r"give .*(state dict|file of weights)") as caught:
            read_state_dict(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_prefixes_of_wrappers_are_stripped_where_that_leads_to_a_wanted_name() -> None:
    one = torch.zeros(1)
    given = {"module.encoder.conv1.weight": one, "module.decoder.weight": one, "encoder.conv": one}
    assert set(strip_prefixes(given, {"conv1.weight", "encoder.conv"})) == {
        "conv1.weight",
        "decoder.weight",
        "encoder.conv",
    }
    with pytest.raises(CheckpointError, match="two tensors of the file are 'conv'"):
        strip_prefixes({"module.conv": one, "conv": one}, {"conv"})


def _odd_tensors() -> dict[str, torch.Tensor]:
    plain = torch.ones(2, 3, 1, 1)
    return {
        "complex64, strided": plain.to(torch.complex64),
        "int64, strided": plain.to(torch.int64),
        "uint64, strided": plain.to(torch.uint64),
        "float8_e4m3fn, strided": plain.to(torch.float8_e4m3fn),
        "float32, sparse_coo": plain.to_sparse(),
        "qint8, strided": torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
        "float32, meta": plain.to("meta"),
        "float32, nested": torch.nested.nested_tensor([plain[0], plain[1]]),
    }


@pytest.mark.parametrize("kind", _odd_tensors())
def test_tensors_that_copying_would_change_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2))
    path = tmp_path / "a.pth"
    torch.save({**module.state_dict(), "0.weight": _odd_tensors()[kind]}, path)
    words = rf"a.pth: '0.weight' is torch.{kind.replace(' ', ' (torch.)?')}, of the network's torch.float32; give"
    if "nested" in kind and torch.__version__ >= "2.15":
        words = "a.pth cannot be read as weights"  # newer loaders take none
    with pytest.raises(CheckpointError, match=words):
        fill(module, str(path))
    torch.save({**module.state_dict(), "1.num_batches_tracked": torch.tensor(1.5)}, path)
    with pytest.raises(CheckpointError, match=r"'1.num_batches_tracked' is torch.float32, torch.strided, of the"):
        fill(module, str(path))


def loaded(path: Path, network: Pretrainable) -> tuple[GraphNetwork, dict[str, torch.Tensor], str]:
    tensors, _, note = load_pretrained(str(path), network)
    module = build_modules(network, seed=1)
    module.load_state_dict(tensors, strict=False)
    return module.eval(), tensors, note


def encoder_output(module: GraphNetwork, node: str, x_BCHW: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    module.layers[node].register_forward_hook(lambda module, inputs, output: kept.append(output.clone()))
    with torch.no_grad():
        module(x_BCHW)
    return kept[0]


def vgg_output(state: Tensors, normed: bool, x: torch.Tensor) -> torch.Tensor:
    number = 0
    for width in VGG:
        if width:
            x = functional.conv2d(x, state[f"features.{number}.weight"], state[f"features.{number}.bias"], padding=1)
            if normed:
                number += 1
                keys = ("running_mean", "running_var", "weight", "bias")
                x = functional.batch_norm(x, *(state[f"features.{number}.{key}"] for key in keys))
            x, number = x.relu(), number + 2
        else:
            x, number = functional.max_pool2d(x, 2), number + 1
    return x


@pytest.mark.parametrize(("norm", "normed"), [("batch", True), ("none", False)])
def test_vgg_16_fits_segnet(norm: str, normed: bool, tmp_path: Path) -> None:
    """Stand-in weights, an eighth as wide: what the encoder gives is what VGG-16 gives with them."""
    state = vgg(normed, thinner=8)
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, tmp_path / "vgg.pth")
    module, _, note = loaded(tmp_path / "vgg.pth", SegNet(base_channels=8, norm=norm))
    x_BCHW = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    assert relative(encoder_output(module, "encoder4-pool", x_BCHW), vgg_output(state, normed, x_BCHW)) < 1e-6
    assert note == f"the encoder begins with {26 + 52 * normed} tensors of {tmp_path}/vgg.pth"


@pytest.mark.parametrize("encoder", list(BLOCKS))
def test_resnets_fit_the_residual_unet(encoder: str, tmp_path: Path) -> None:
    state = resnet(BLOCKS[encoder], encoder == "resnet50", 8)
    save_file({f"encoder.{name}": tensor for name, tensor in state.items()}, tmp_path / "resnet.safetensors")
    module, _, note = loaded(tmp_path / "resnet.safetensors", ResidualUNet(encoder, 8))
    x_BCHW = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    found_BCHW = encoder_output(module, f"layer4-{BLOCKS[encoder][3] - 1}-relu", x_BCHW)
    assert relative(found_BCHW, reference_resnet(state, encoder, 32, x_BCHW)) < 1e-5
    assert "lacks" not in note
    assert "left out" in note, "encoder.fc is no name of the published network"


def test_the_wide_resnet_fits_g_scnn(tmp_path: Path) -> None:
    torch.save(wide_resnet(8), tmp_path / "wide.pth")
    network = GatedSCNN(base_channels=8, image_mean=False)
    module, tensors, note = loaded(tmp_path / "wide.pth", network)
    encoder = [name for name in module.state_dict() if name.startswith("layers.mod")]
    counters = [name for name in encoder if name.endswith("num_batches_tracked")]
    assert len(tensors) == len(encoder) - len(counters)
    assert note.endswith("wide.pth; left out: 'bn_out.0.weight' and 3 more")


@pytest.mark.parametrize("bands", [1, 2, 3, 4, 7])
def test_the_first_convolution_takes_any_bands(bands: int) -> None:
    weight = torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wide = widened(weight, bands)
    assert wide.shape == (5, bands, 3, 3)
    assert torch.allclose(wide.sum(1), weight.sum(1), rtol=1e-12, atol=1e-12), "grey excites it as before"
    if bands >= 3:
        assert torch.equal(wide[:, :3], weight * (3 / bands)), "red, green and blue stay what they are"


def test_files_of_other_networks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    for state, network, words in (
        (resnet((2, 2, 2, 2), False, 8), SegNet(base_channels=8), "holds none of the weights of SegNet of 5 levels"),
        (resnet((2, 2, 2, 2), False, 4), ResidualUNet("resnet18", 8), r"'conv1.weight' is \(4, 3, 7, 7\), but"),
        (
            resnet((2, 2, 2, 2), False, 8),
            ResidualUNet("resnet18", 8, "none"),
            "20 fit nowhere; set model.norm to batch",
        ),
        ({"conv1.weight": torch.full((8, 3, 7, 7), float("nan"))}, ResidualUNet("resnet18", 8), "is not finite"),
    ):
        torch.save(state, path)
        with pytest.raises(CheckpointError, match=words):
            load_pretrained(str(path), network)
    with pytest.raises(CheckpointError, match=r"missing\.pth: No such file"):
        load_pretrained(str(tmp_path / "missing.pth"), SegNet())
