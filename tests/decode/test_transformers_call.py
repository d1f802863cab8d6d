"""A call as transformers' generate, its return value, lengths, stop strings and streamer."""

import pytest
import tiny_chat
import torch
from transformers import GenerationConfig, TextStreamer

import draftwood as dw
from draftwood.decode.transformers_call import read_config


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return dw.load_target(str(tiny_chat.save(tmp_path_factory.mktemp("target"))), dtype="float32")


@pytest.fixture(scope="module")
def ids(target):
    return target.tokenizer("hello wörld", return_tensors="pt")["input_ids"]


@pytest.mark.parametrize("fields", [dict(max_new_tokens=20), dict(max_length=30), {}], ids=str)
def test_the_sequences_are_those_of_transformers(fields, target, ids, oracle):
    config = GenerationConfig(eos_token_id=[2, 41], **fields)
    want = target.model.generate(ids, generation_config=config)
    out = dw.generate(target, oracle([want[0, ids.shape[1] :].tolist()]), ids, generation_config=config)
    assert torch.equal(out.sequences, want)


def test_ended_rows_are_padded_as_by_transformers(target, ids):
    config = GenerationConfig(max_new_tokens=30)
    batch = torch.cat([ids, ids.flip(1)])
    first = target.model.generate(batch, generation_config=config)[:, ids.shape[1] :]
    end = next(int(t) for t in first[0] if t not in first[1])
    config = GenerationConfig(max_new_tokens=30, eos_token_id=end, pad_token_id=0)
    want = target.model.generate(batch, generation_config=config, attention_mask=torch.ones_like(batch))
    assert torch.equal(dw.generate(target, None, batch, generation_config=config).sequences, want)


def test_a_stop_string_ends_with_the_token_that_completes_it_inside_a_block_too(target, oracle):
    ids = target.tokenizer("a", return_tensors="pt")["input_ids"]
    free = dw.generate(target, None, ids, max_new_tokens=24, eos_token_ids=1).tokens[0]
    text = target.tokenizer.decode(free[13:17])
    for stop in (text, ["never there", text[1:]]):
        config = GenerationConfig(max_new_tokens=24, eos_token_id=1, stop_strings=stop)
        want = target.model.generate(ids, generation_config=config, tokenizer=target.tokenizer)
        assert want.shape[1] == 1 + 17
        for draft in (None, *(oracle([free], seed) for seed in range(4))):
            out = dw.generate(target, draft, ids, max_new_tokens=24, eos_token_ids=1, stop_strings=stop)
            assert torch.equal(out.sequences, want)
            assert sum(f.emitted for f in out.rows[0].forwards) == len(out.tokens[0]) - 1


def test_sampling_is_read_with_the_defaults_of_transformers(target, ids):
    read = read_config(target, GenerationConfig(do_sample=True, temperature=0.7), 4)
    assert (read["temperature"], read["top_k"], read["top_p"], read["max_new_tokens"]) == (0.7, 50, 1.0, 20)
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=6)
    first, again = (dw.generate(target, None, ids, generation_config=config, seed=3).tokens for _ in range(2))
    assert first == again
    assert read_config(target, GenerationConfig(temperature=0.7), 4)["temperature"] == 0  # not do_sample: greedy


def test_a_streamer_prints_what_it_prints_for_transformers(target, ids, capsys, oracle):
    config = GenerationConfig(max_new_tokens=12, eos_token_id=None)
    want = target.model.generate(ids, generation_config=config, streamer=TextStreamer(target.tokenizer))
    shown = capsys.readouterr().out
    draft = oracle([want[0, ids.shape[1] :].tolist()])
    dw.generate(target, draft, ids, generation_config=config, streamer=TextStreamer(target.tokenizer))
    assert capsys.readouterr().out == shown
    with pytest.raises(ValueError, match="streamer: input_ids has 2 rows"):
        dw.generate(target, None, ids.expand(2, -1), streamer=TextStreamer(target.tokenizer))
