from __future__ import annotations

import json

import pytest

from kvxfer.cli import exit_codes

torch = pytest.importorskip("torch", reason="the demo needs torch")
transformers = pytest.importorskip("transformers", reason="the demo needs transformers")


pytestmark = pytest.mark.timeout(120)  # three processes that import torch


def test_the_demo_keeps_every_promise(kvxfer):
    outcome = kvxfer("demo", "--lane", "local", "--prompt-tokens", "100", "--new-tokens", "12", "--json")
    assert outcome.status == exit_codes.OK, json.dumps(outcome.document, indent=1)
    shown = outcome.document["lanes"][0]
    assert shown["identical"] is True
    assert shown["tokens_with_other_weights"] != outcome.document["tokens_alone"]
    assert [incident["kind"] for incident in shown["incidents"]] == ["tokens", "coverage"]
    assert all(shown["checks"].values())


def test_a_model_from_a_local_folder_is_handed_over(kvxfer, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    outcome = kvxfer("demo", "--lane", "tcp", "--model", str(tmp_path), "--prompt-tokens", "40", "--json")
    assert outcome.status == exit_codes.OK, json.dumps(outcome.document, indent=1)
    assert outcome.document["lanes"][0]["identical"] is True
