"""Blocks, embedding and head, found in model trees of several kinds."""

import pytest
import torch
import torch.nn as nn

from overlapkit.parallel.structure import Structure, find_structure
from tests.parallel.models import Block, Gpt


class Part(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Residual(Part):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)
        self.conv2, self.norm2 = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)


class ResNet(Part):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 3, 7), nn.BatchNorm2d(3)
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.layer2 = nn.Sequential(Residual(), Residual(), Residual())
        self.fc = nn.Linear(3, 10)


class FlatResNet(Part):
    """Blocks as attributes, no list anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 3)
        self.block1, self.block2, self.block3 = Residual(), Residual(), Residual()
        self.fc = nn.Linear(3, 10)


class Experts(Part):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(7, 2)
        self.experts = nn.ModuleList(Block() for _ in range(2))


class Stack(Part):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(7)


class EncoderDecoder(Part):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 7)
        self.encoder, self.decoder = Stack(), Stack()


class ClassifierOnEmbedding(Part):
    """The head is no vocabulary projection, so the embedding's weight may serve as one inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(7, 3)


class HeadFirst(Part):
    """Registered before the blocks: the order says nothing about the head, so it stays in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 11)
        self.blocks = nn.ModuleList(Block() for _ in range(2))


class WordsFirst(HeadFirst):
    """As HeadFirst, but with words: without the head in a unit both tables meet in one (Automodel#3708)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)


class Stage(Part):
    def __init__(self, kind: type[nn.Module], depth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.layers = (
            kind([Residual() for _ in range(depth)])
            if kind is nn.ModuleList
            else kind(*(Residual() for _ in range(depth)))
        )


def _repeated(module: nn.Module, times: int) -> nn.ModuleList:
    return nn.ModuleList([module] * times)


CASES = {
    "gpt": (Gpt(2), "embed", ("blocks.0", "blocks.1"), ("norm", "head")),
    "tied gpt": (Gpt(2, tied=True), None, ("blocks.0", "blocks.1"), ("norm", "head")),
    "encoder": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8), 3, enable_nested_tensor=False),
        None,
        ("layers.0", "layers.1", "layers.2"),
        (),
    ),
    "resnet": (
        ResNet(),
        None,
        ("layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"),
        ("fc",),
    ),
    "flat resnet": (FlatResNet(), None, ("block1", "block2", "block3"), ("fc",)),
    "stages in a list": (
        nn.Sequential(nn.Sequential(Residual(), Residual()), nn.Sequential(Residual(), Residual())),
        None,
        ("0.0", "0.1", "1.0", "1.1"),
        (),
    ),
    "mlp": (
        nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1)),
        None,
        ("0", "2", "4"),
        (),
    ),
    "experts stay whole": (
        nn.ModuleDict({"layers": nn.ModuleList(Experts() for _ in range(2))}),
        None,
        ("layers.0", "layers.1"),
        (),
    ),
    "encoder and decoder": (
        EncoderDecoder(),
        None,
        ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"),
        (),
    ),
    "embedding that may be used twice": (
        ClassifierOnEmbedding(),
        None,
        ("blocks.0", "blocks.1"),
        ("head",),
    ),
    "head first": (HeadFirst(), None, ("blocks.0", "blocks.1"), ()),
    "words after a head first": (WordsFirst(), "embed", ("blocks.0", "blocks.1"), ("head",)),
    "depth 1": (Gpt(1), "embed", ("blocks.0",), ("norm", "head")),
    "one of several heads after blocks": (
        nn.ModuleDict(
            {
                "blocks": nn.ModuleList([Block(), Block()]),
                "heads": nn.ModuleDict({"words": nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 11))}),
            }
        ),
        None,
        ("blocks.0", "blocks.1"),
        ("heads.words.0", "heads.words.1"),
    ),
    "an odd one between blocks": (
        nn.ModuleDict({"layers": nn.ModuleList([Block(), Residual(), Block()])}),
        None,
        ("layers.0", "layers.1", "layers.2"),
        (),
    ),
    "stages that run in turn": (
        nn.ModuleDict({"stages": nn.ModuleList([Stage(nn.Sequential, 2), Stage(nn.Sequential, 2)])}),
        None,
        ("stages.0.layers.0", "stages.0.layers.1", "stages.1.layers.0", "stages.1.layers.1"),
        (),
    ),
    "stages of several depths": (
        nn.ModuleDict({"stages": nn.ModuleList([Stage(nn.ModuleList, 2), Stage(nn.ModuleList, 3)])}),
        None,
        ("stages.0.layers.0", "stages.0.layers.1")
        + ("stages.1.layers.0", "stages.1.layers.1", "stages.1.layers.2"),
        (),
    ),
    "experts among dense blocks": (
        nn.ModuleDict({"layers": nn.ModuleList([Block(), Experts(), Experts()])}),
        None,
        ("layers.0", "layers.1", "layers.2"),
        (),
    ),
    "one linear": (nn.Linear(3, 3), None, (), ()),
    "one block": (nn.Sequential(nn.Linear(3, 3)), None, (), ()),
    "the same block twice": (nn.ModuleDict({"blocks": _repeated(Block(), 2)}), None, (), ()),
    "only norms repeat": (nn.ModuleList([nn.LayerNorm(3), nn.LayerNorm(3)]), None, (), ()),
    "nothing": (nn.Module(), None, (), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_structure(name: str):
    model, embedding, blocks, head = CASES[name]
    assert find_structure(model) == Structure(embedding, blocks, head)


def test_the_larger_embedding_is_the_vocabulary():
    model = Gpt(2)
    model.positions = nn.Embedding(5, 7)
    assert find_structure(model).embedding == "embed"
    model.positions = nn.Embedding(2 * 11, 7)  # larger than the head's vocabulary: no pair with it
    assert find_structure(model).embedding is None


def test_a_direct_parameter_beside_the_blocks_changes_nothing():
    model = Gpt(2)
    model.scale = nn.Parameter(torch.ones(7))
    assert find_structure(model).blocks == ("blocks.0", "blocks.1")
