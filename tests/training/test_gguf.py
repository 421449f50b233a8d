"""A GGUF file is dequantised once, into a folder that loads like any other, however many ask at the same time."""

import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import make_model, make_tokenizer
from training.errors import ModelError
from training.rank.source import find_source
from training.rundir import verify

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary halves of each head side by side, as llama.cpp keeps them."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, family: str = "llama", left_out: str = "") -> torch.nn.Module:
    """A tiny model as a GGUF file in fp32, but for one weight; the model that is in it."""
    model, tokenizer = make_model(family), make_tokenizer()
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(258)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    tokens[tokens.index("Ā")] = "ab"  # a byte-pair vocabulary has at least one pair
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.add_bos_token_id(257)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weight in model.state_dict().items():
        if name == left_out:
            continue
        module, _, kind = name.rpartition(".")
        if module in OUTER:
            writer.add_tensor(f"{OUTER[module]}.weight", weight.numpy())
            continue
        _, _, layer, inner = module.split(".", 3)
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(inner) if family == "llama" else None
        kept = interleave(weight, heads) if heads else weight
        writer.add_tensor(f"blk.{layer}.{NAMES[inner]}.{kind}", kept.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BURNISH_MODEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_becomes_a_folder_with_the_same_weights_and_the_template(family: str, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", family)
    source = find_source(str(tmp_path / "tiny.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(source.folder)
    assert loaded.config.model_type == family
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())
    assert (source.folder / "chat_template.jinja").read_text() == make_tokenizer().chat_template
    assert "quantization_config" not in (source.folder / "config.json").read_text()


def test_weights_that_a_gguf_file_lacks_are_not_made_up(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", left_out="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"tiny.gguf: it lacks model.layers.1.mlp.up_proj.weight; fetch it again"):
        find_source(str(tmp_path / "tiny.gguf"))
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == []


def test_it_is_converted_once_and_found_again_under_another_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    first = find_source(str(tmp_path / "tiny.gguf"))
    made = (first.folder / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "tiny.gguf").rename(tmp_path / "renamed.gguf")
    again = find_source(str(tmp_path / "renamed.gguf"))
    assert again == first
    assert (again.folder / "model.safetensors").stat().st_mtime_ns == made


def test_two_processes_that_ask_at_once_get_one_whole_folder(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    code = "import sys; from training.rank.source import find_source; print(find_source(sys.argv[1]).folder)"
    command = [sys.executable, "-c", code, str(tmp_path / "tiny.gguf")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate()[0].splitlines()[-1] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(folders) == 1
    assert [str(entry) for entry in cache.iterdir() if entry.is_dir()] == list(folders)


def test_what_a_killed_conversion_left_is_replaced(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder = find_source(str(tmp_path / "tiny.gguf")).folder
    shutil.rmtree(folder)
    (folder.with_name(f".{folder.name}")).mkdir()
    (folder.with_name(f".{folder.name}") / "model.safetensors").write_bytes(b"half")
    again = find_source(str(tmp_path / "tiny.gguf")).folder
    assert verify(again) is None
    assert not folder.with_name(f".{folder.name}").exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"<html>not found</html>")
    with pytest.raises(ModelError, match="not a GGUF file"):
        find_source(str(tmp_path / "tiny.gguf"))


def test_a_gguf_file_that_was_cut_off_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="this GGUF cannot be read"):
        find_source(str(tmp_path / "tiny.gguf"))
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == []
