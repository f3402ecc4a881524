"""A layer of experts with shared ones, read by all ranks of a split: their sum is the slow twin's."""

from __future__ import annotations

import numpy as np
import pytest
from made_deepseek import V2, V3, tensors, write_gguf
from made_models import write_folder
from test_routing import slow as routed

from mpillm import kernels
from mpillm.models.load import Loader
from mpillm.models.load_experts import held, read_experts, router_bytes
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import Sizes, partition

PREFIX, ROWS = "model.layers.2.", 21


class _Alone:
    tp = 1

    def all_reduce(self, array):
        pass

    def exchange_arguments(self):
        return None

    def check(self):
        pass


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def slow(config: dict, found: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The layer in float64, by the papers."""
    third = config["model_type"] == "deepseek_v3"
    count = config["n_routed_experts"]
    correction = found[PREFIX + "mlp.gate.e_score_correction_bias"] if third else np.zeros(count)
    r = {"sigmoid": third, "correction": correction, "groups": config["n_group"], "kept": config["topk_group"],
         "both": third, "normed": third, "count": config["num_experts_per_tok"],
         "scale": config["routed_scaling_factor"], "shared": 0}

    def gated(at: str, row: np.ndarray) -> np.ndarray:
        gate, up, down = (found[f"{PREFIX}mlp.{at}.{part}_proj.weight"].astype(np.float64)
                          for part in ("gate", "up", "down"))
        return down @ (silu(gate @ row) * (up @ row))

    out = []
    for row in x.astype(np.float64):
        chosen, weights = routed(found[PREFIX + "mlp.gate.weight"] @ row, r)
        out.append(gated("shared_experts", row) + sum(
            weight * gated(f"experts.{e}", row) for e, weight in zip(chosen, weights, strict=True)))
    return np.array(out)


def sizes_of(config) -> Sizes:
    return Sizes(config.hidden, config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim,
                 config.expert_intermediate, config.vocab, 32, experts=config.experts,
                 experts_chosen=config.experts_chosen, shared=config.shared_experts, dense_layers=1,
                 dense_intermediate=config.intermediate)


def computed(path: str, tp: int, asked: str, moe_split: str, x: np.ndarray) -> tuple[np.ndarray, bool]:
    """The sum over the ranks, and whether shared experts stand by themselves; bytes are those that were foretold."""
    config, checkpoint = open_model(path)
    weights, total, apart = Weights(checkpoint, config), np.zeros(x.shape), set()
    for share in partition(sizes_of(config), tp, moe_split=moe_split).shares:
        loader = Loader(config, weights, share, asked, _Alone())
        layer = read_experts(loader, PREFIX)
        apart.add(layer.shared is not None)
        foretold = sum(nbytes for *_, nbytes in held(config, weights, PREFIX, share, asked))
        assert loader.nbytes == foretold + router_bytes(config, weights, PREFIX, share, asked)
        plan = kernels.Plan(32)
        layer.input(plan, config.hidden)[:ROWS] = x
        residual = plan.buffer("residual", config.hidden)
        layer.record(plan, residual, None, plan.buffer("normed", config.hidden))
        plan.run_alone(ROWS)
        total += residual[:ROWS]
    assert len(apart) == 1
    return total, apart.pop()


def made(config: dict) -> tuple[dict, np.ndarray, np.ndarray]:
    """Tensors small enough that sums keep their bits, rows, and what the layer makes of them."""
    found = {name: x / 8 if ".mlp." in name and "correction" not in name else x for name, x in tensors(config).items()}
    x = np.random.default_rng(3).normal(size=(ROWS, config["hidden_size"])).astype(np.float32)
    return found, x, slow(config, found, x)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("config", [V2, V3, V3 | {"n_shared_experts": 1}], ids=["v2", "v3", "v3 with one shared"])
@pytest.mark.parametrize("tp, moe_split", [(1, "columns"), (3, "columns"), (4, "experts"), (11, "experts"),
                                           (3, "auto")])
def test_the_sum_over_ranks_is_the_layer(tmp_path, config, tp, moe_split):
    found, x, wanted = made(config)
    total, apart = computed(write_folder(tmp_path / "m", config, found), tp, "f32", moe_split, x)
    assert error(total, wanted) < 3e-6 and apart == (moe_split != "columns")


@pytest.mark.parametrize("asked, tolerance, apart", [
    ("q8_0", 0.03, False), ("shared=f32,experts=q8_0,default=f32", 0.03, True), ("shared=q8_0,default=f32", 0.03, True),
    ("shared=bf16,experts=bf16,default=f32", 0.03, False)])
@pytest.mark.parametrize("tp", [1, 2])
def test_shared_experts_may_have_a_format_of_their_own(tmp_path, asked, tolerance, apart, tp):
    config = V3 | {"hidden_size": 168}      # inputs that are no whole blocks
    found, x, wanted = made(config)
    total, found_apart = computed(write_folder(tmp_path / "m", config, found), tp, asked, "columns", x)
    assert error(total, wanted) < tolerance and found_apart == apart


@pytest.mark.parametrize("layout", ["whole", "stacked"])
def test_gguf_gives_the_same_layer(tmp_path, layout):
    found, x, wanted = made(V3)
    total, _ = computed(write_gguf(tmp_path / "m.gguf", V3, found, layout), 2, "f32", "columns", x)
    assert error(total, wanted) < 3e-6
