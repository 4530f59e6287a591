"""Folders of Hugging Face run on inputs as the modules of its library."""

import json
import re
import shutil

import numpy as np
import pytest
from closeness import assert_close
from commands import command
from optional import skip_without
from refusals import refused

import tnsim
from tnsim.cli import pairwise

torch = pytest.importorskip("torch")
skip_without("transformers")


TOKENS = np.random.default_rng(0).integers(0, 11, size=(20, 6))
DATA = tnsim.Empirical(TOKENS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    import transformers

    where = tmp_path_factory.mktemp("hub")
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    )
    net.save_pretrained(where / "a")
    with torch.no_grad():  # near it, so that a change is split at few nodes
        for weight in net.parameters():
            weight.add_(0.005 * torch.randn_like(weight))
    net.save_pretrained(where / "b")
    return where / "a", where / "b"


@pytest.fixture
def run(folders, tmp_path):
    """Both as checkpoints of a run, beside what training keeps for itself."""
    for step, folder in zip((20, 100), folders, strict=True):
        shutil.copytree(folder, tmp_path / "run" / f"checkpoint-{step}")
        torch.save({"state": {}}, tmp_path / "run" / f"checkpoint-{step}" / "optimizer.pt")
    return tmp_path / "run"


def test_folders_are_what_their_modules_are(folders):
    import transformers

    nets = [transformers.GPT2LMHeadModel.from_pretrained(path).eval() for path in folders]
    wanted = tnsim.similarity(*nets, DATA)
    assert_close(tnsim.similarity(*folders, DATA), wanted, rtol=1e-12)
    run = tnsim.pairwise(list(folders), DATA)
    assert run.a.values.tolist() == ["a", "b"]
    assert_close(run.similarity[0, 1], wanted, rtol=1e-12)
    layers = tnsim.layer_similarity(*folders, TOKENS)
    assert_close(layers.values, tnsim.layer_similarity(*nets, TOKENS).values, rtol=1e-12)


def test_runs_of_folders_are_in_order(folders, run):
    for given in (run, str(run / "checkpoint-*")):
        found = tnsim.pairwise(given, DATA)
        assert found.a.values.tolist() == [20, 100]
        assert_close(found.similarity[0, 1], tnsim.similarity(*folders, DATA), rtol=1e-12)


@pytest.mark.slow
def test_a_change_of_a_run_of_folders(folders, run):
    wanted = tnsim.change(*folders, DATA)
    score = tnsim.change(*folders, of=lambda net: net(torch.tensor([[1, 2]])).logits.sum())
    assert set(score.components) == set(wanted.components)
    found = tnsim.change(run, metric=DATA)
    assert found.labels == ("100",) and found.components == wanted.components
    assert_close(found.share[0], wanted.share, rtol=1e-12)
    assert tnsim.change(list(folders), metric=DATA).labels == ("b",)


def test_commands_run_folders_on_inputs(folders, run, tmp_path, capfd):
    np.save(tmp_path / "x.npy", TOKENS)
    asked = "--metric", "empirical", "--inputs", tmp_path / "x.npy"
    wanted = tnsim.similarity(*folders, DATA)
    found = json.loads(command("similarity", *folders, *asked, "--json").stdout)
    assert_close(found["similarity"], wanted, rtol=1e-12)
    said = command("pairwise", run, *asked, "--out", tmp_path / "out").stdout
    assert "empirical (on these inputs, with standard errors up to" in said
    assert_close(np.load(tmp_path / "out" / "result.npz")["similarity"][0, 1], wanted, rtol=1e-12)
    for name, folder in zip("ab", folders, strict=True):  # folders of one name
        shutil.copytree(folder, tmp_path / name / "final")
    final = (tmp_path / name / "final" for name in "ab")
    said = command("pairwise", *final, *asked, "--out", tmp_path / "final").stdout
    assert f"of {tmp_path}/a/final and {tmp_path}/b/final" in said
    shares = tnsim.change(*folders, DATA, by="block").share
    by_block = *asked, "--by", "block", "--json"
    found = json.loads(command("change", *folders, *by_block).stdout)
    assert_close(np.array(found["share"]), shares, rtol=1e-12)
    found = json.loads(command("change", run, *by_block).stdout)
    assert_close(np.array(list(found["shares"]["100"].values())), shares, rtol=1e-12)
    assert "--parts qk,ov,mlp" in command("similarity", *folders, check=False).stderr
    several = command("similarity", run, folders[0], *asked, check=False)
    assert "run holds 2 checkpoints" in several.stderr
    assert "Loading" not in capfd.readouterr().err


def test_a_run_of_folders_is_followed(folders, run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    late = run / "checkpoint-100" / "config.json"
    text, looks = late.read_text(), []
    late.unlink()

    def sleep(_):
        looks.append(None)
        if len(looks) == 3:  # weights without a configuration were refused
            late.write_text(text)

    monkeypatch.setattr(pairwise.time, "sleep", sleep)
    np.save(tmp_path / "x.npy", TOKENS)
    asked = "--metric", "empirical", "--inputs", tmp_path / "x.npy"
    said = command("pairwise", run, *asked, "--out", out, "--follow", 0.05, "--until", 2).stdout
    assert said.count("waiting for") == 1 and "models 1, 1 new" in said
    assert "models 2, 1 new" in said and "of 20 and 100" in said and len(looks) == 3
    found = np.load(out / "result.npz")["similarity"][0, 1]
    assert_close(found, tnsim.similarity(*folders, tnsim.Empirical(TOKENS)), rtol=1e-12)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # between libraries
def test_adapters_run_as_their_base_with_both_weights(folders, tmp_path):
    skip_without("peft")
    import peft
    import transformers
    from safetensors.torch import load_file

    base = transformers.GPT2LMHeadModel.from_pretrained(folders[0])
    known = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    settings = peft.LoraConfig(r=2, init_lora_weights=False, **known)
    tuned = peft.get_peft_model(base, settings)
    tuned.save_pretrained(tmp_path / "checkpoint-5")
    net = transformers.GPT2LMHeadModel.from_pretrained(folders[0])
    wanted = tnsim.similarity(net.eval(), tuned.eval(), DATA)
    assert wanted < 1 - 1e-6
    adapter = tmp_path / "checkpoint-5"
    assert_close(
        tnsim.similarity(folders[0], adapter, DATA), wanted, rtol=1e-5, limited_by="float32"
    )
    shutil.copytree(adapter, older := tmp_path / "checkpoint-10")
    (older / "adapter_model.safetensors").unlink()
    torch.save(load_file(adapter / "adapter_model.safetensors"), older / "adapter_model.bin")
    run = tnsim.pairwise(tmp_path, DATA)
    assert run.a.values.tolist() == [5, 10]
    assert_close(run.similarity.values, np.ones((2, 2)))
    moved = tnsim.change(folders[0], adapter, DATA)
    assert moved.components[moved.share.argmax()] == "transformer.h.0.attn"


class Code:
    def __reduce__(self):
        return print, ("run",)


def test_folders_of_pickles_are_those_of_safetensors(folders, tmp_path, capfd):
    """Older repositories have weights as pickles alone, which were refused on inputs."""
    from safetensors.torch import load_file

    states = [load_file(folder / "model.safetensors") for folder in folders]
    steps = [tmp_path / f"checkpoint-{n}" for n in (1, 2)]
    for step, folder in zip(steps, folders, strict=True):
        step.mkdir()
        shutil.copy(folder / "config.json", step)
    torch.save(states[0], steps[0] / "pytorch_model.bin")
    places = dict.fromkeys(states[1], "pytorch_model-00002-of-00002.bin")
    places["transformer.wte.weight"] = "pytorch_model-00001-of-00002.bin"
    for part in set(places.values()):
        torch.save({k: v for k, v in states[1].items() if places[k] == part}, steps[1] / part)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (steps[1] / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    wanted = tnsim.similarity(*folders, DATA)
    assert_close(tnsim.similarity(*steps, DATA), wanted, rtol=1e-12)
    assert_close(tnsim.pairwise(tmp_path, DATA).similarity[0, 1], wanted, rtol=1e-12)
    torch.save({**states[0], "code": Code()}, steps[0] / "pytorch_model.bin")
    with refused("checkpoint-1: not plain weights", tnsim.CheckpointError):
        tnsim.similarity(*steps, DATA)
    assert "run" not in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # between libraries
def test_adapters_of_networks_whose_files_have_other_names(tmp_path):
    """The library renames the readout of GPT-NeoX as it reads and writes."""
    skip_without("peft")
    import peft
    import transformers

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GPTNeoXConfig(**sizes, intermediate_size=8, max_position_embeddings=8)
    net = transformers.GPTNeoXForCausalLM(config)
    net.save_pretrained(tmp_path / "base")
    net = transformers.GPTNeoXForCausalLM.from_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["query_key_value"])
    tuned = peft.get_peft_model(net, settings)
    tuned.save_pretrained(tmp_path / "adapter")
    found = tnsim.similarity(tmp_path / "adapter", tuned.eval(), DATA)
    assert_close(found, 1.0, rtol=1e-6, limited_by="float32")
    assert tnsim.similarity(tmp_path / "adapter", tmp_path / "base", DATA) < 1 - 1e-6


def test_files_beside_a_configuration_are_not_its_network(folders, tmp_path):
    shutil.copy(folders[0] / "config.json", tmp_path)
    for step in (1, 2):
        shutil.copy(folders[0] / "model.safetensors", tmp_path / f"step_{step}.safetensors")
    with refused("attention", tnsim.UnsupportedLayer):
        tnsim.pairwise(tmp_path, DATA)


def test_folders_without_inputs_name_the_way(folders):
    with refused("attention", tnsim.UnsupportedLayer):
        tnsim.similarity(*folders)
    (folders[1] / "config.json").write_text('{"architectures": ["os"]}')
    with refused("no network of transformers", tnsim.CheckpointError):
        tnsim.similarity(*folders, DATA)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("transformer.h.0.mlp.c_fc.weight", None, "are not in its files: transformer.h.0.mlp.c_fc"),
        ("transformer.h.7.mlp.c_fc.weight", (8, 32), "in no layer: transformer.h.7.mlp.c_fc"),
        ("transformer.wte.weight", (12, 8), "other shapes in its files: transformer.wte.weight"),
    ],
)
def test_files_of_other_tensors_are_no_network(folders, tmp_path, name, change, said):
    """The library gives random numbers to what a file lacks, and goes on."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders[0], tmp_path / "c")
    file = tmp_path / "c" / "model.safetensors"
    tensors = load_file(file)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = torch.ones(change)
    save_file(tensors, file, {"format": "pt"})
    with refused(said, tnsim.CheckpointError):
        tnsim.similarity(folders[0], tmp_path / "c", DATA)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\x00" * 64])
def test_damaged_folders_are_refused_in_one_way(folders, tmp_path, name, content):
    shutil.copytree(folders[0], tmp_path / "c")
    (tmp_path / "c" / name).write_bytes(content)
    for call in (tnsim.similarity, lambda *pair: tnsim.pairwise(list(pair[:2]), pair[2])):
        with refused(re.escape(str(tmp_path / "c")), tnsim.CheckpointError):
            call(folders[0], tmp_path / "c", DATA)


def test_attention_without_dropout_draws_nothing(folders):
    import transformers

    net = transformers.GPT2LMHeadModel.from_pretrained(folders[0]).eval()
    with pytest.raises(tnsim.UnsupportedLayer) as refused:
        tnsim.from_module(net, n_ctx=4)
    assert "random numbers" not in str(refused.value)
