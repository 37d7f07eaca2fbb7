"""Tests which bases are refused, which modules get adapters, and that every architecture trains."""

import json
import os
import tempfile
import types
import unittest
import unittest.mock

import peft
import torch
import transformers
from flotilla_trainer import models, saving
from flotilla_trainer.errors import Refused

GOLDENS = os.path.join(os.path.dirname(__file__), "../../../../tests/golden/data/hf")
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The modules that get an adapter if the seven are asked for.
TARGETS = {
    "gemma2-tiny": SEVEN,
    "gemma3-images-tiny": SEVEN,
    "gemma3-tiny": SEVEN,
    "granite-tiny": SEVEN,
    "llama-tiny": SEVEN,
    "mistral-tiny": SEVEN,
    "olmo2-tiny": SEVEN,
    "phi3-tiny": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "phi4-tiny": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "qwen2-tiny": SEVEN,
    "qwen3-tiny": SEVEN,
    "qwen3moe-tiny": SEVEN[:4],
    "smollm3-tiny": SEVEN,
}


class Refusals(unittest.TestCase):
    def refusal(self, fields, *files):
        with tempfile.TemporaryDirectory() as base:
            with open(os.path.join(base, "config.json"), "w", encoding="utf-8") as file:
                file.write(fields if isinstance(fields, str) else json.dumps(fields))
            for name in files:
                with open(os.path.join(base, name), "w", encoding="utf-8") as file:
                    file.write("raise SystemExit('code of a model was run')\n")
            with self.assertRaises(Refused) as refused:
                models.read_config(base)
            return str(refused.exception)

    def test_quantised_weights_are_refused_with_their_method(self):
        for settings in ({"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}):
            fields = {"model_type": "llama", "quantization_config": settings}
            refused = self.refusal(fields)
            for part in ("config.json", "quantization_config", settings["quant_method"], "use the"):
                self.assertIn(part, refused)

    def test_code_of_a_model_is_not_run(self):
        fields = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}
        refused = self.refusal(fields, "configuration_own.py")
        for part in ("config.json", "auto_map", "configuration_own.py", "never run", "such as qwen3"):
            self.assertIn(part, refused)

    def test_unknown_models_and_broken_files_are_refused(self):
        self.assertIn("does not know model_type 'own'", self.refusal({"model_type": "own"}))
        self.assertIn("cannot be read", self.refusal("{"))
        self.assertIn("is not a JSON object", self.refusal("[]"))

    def test_unneeded_code_does_not_matter(self):
        config = models.read_config(os.path.join(GOLDENS, "phi3-tiny"))
        with tempfile.TemporaryDirectory() as base:
            config.auto_map = {"AutoConfig": "configuration_phi3.Phi3Config"}
            config.save_pretrained(base)
            with open(os.path.join(base, "configuration_phi3.py"), "w", encoding="utf-8") as file:
                file.write("raise SystemExit('code of a model was run')\n")
            self.assertEqual(type(models.read_config(base)), type(config))


class Architectures(unittest.TestCase):
    def test_every_golden_model_is_listed(self):
        self.assertEqual(sorted(TARGETS), sorted(os.listdir(GOLDENS)))

    def test_adapters_of_every_architecture_train(self):
        policy = types.SimpleNamespace(attention="sdpa")
        for name, targets in TARGETS.items():
            path = os.path.join(GOLDENS, name)
            config = models.read_config(path)
            kind = models.attention(config, policy)
            self.assertEqual(kind, "eager" if name == "gemma2-tiny" else "sdpa")
            options = {"dtype": torch.float32, "attn_implementation": kind}
            model = models._load_base(path, options, torch.device("cpu"), False)
            found = models.target_modules(model, SEVEN)
            self.assertEqual(found, sorted(targets), name)
            settings = peft.LoraConfig(r=2, target_modules=found, task_type="CAUSAL_LM")
            adapted = peft.get_peft_model(model, settings)
            tokens = torch.arange(8)[None]
            adapted(input_ids=tokens, labels=tokens).loss.backward()
            for parameter, value in adapted.named_parameters():
                if "lora_B" in parameter:
                    self.assertGreater(float(value.grad.abs().max()), 0.0, f"{name} {parameter}")

    def test_a_model_with_other_modules_gets_adapters_on_all(self):
        settings = {
            "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1,
        }  # fmt: skip
        made = lambda kind: transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **settings)
        )
        # It has no gate.
        arcee = sorted(set(SEVEN) - {"gate_proj"})
        self.assertEqual(models.target_modules(made("arcee"), SEVEN), arcee)
        starcoder = made("starcoder2")
        self.assertEqual(models.target_modules(starcoder, SEVEN), "all-linear")
        self.assertEqual(models.target_modules(starcoder, ["q_proj"]), ["q_proj"])
        neox = made("gpt_neox")
        self.assertEqual(models.target_modules(neox, SEVEN), "all-linear")
        self.assertEqual(models.target_modules(neox, ["query_key_value"]), ["query_key_value"])
        named = "no linear module lm_head, nonsense; name some of dense, "
        with self.assertRaisesRegex(Refused, named):
            models.target_modules(neox, ["dense", "nonsense", "lm_head"])
        self.assertEqual(models.positions(starcoder.config, 8), 4096)
        self.assertEqual(models.positions(types.SimpleNamespace(), 8), 8)

    def test_a_base_in_four_bits_trains(self):
        path = os.path.join(GOLDENS, "qwen2-tiny")
        lora = types.SimpleNamespace(
            r=2, alpha=4, target_modules=SEVEN, dropout=0.0, freeze_a=False, quantization="NF4"
        )
        call = types.SimpleNamespace(
            training=types.SimpleNamespace(lora=lora), resume=None, base=path, seed=1, slice=None,
            adapter=None, random_init=False, policy=types.SimpleNamespace(dtype="f32"),
        )  # fmt: skip
        model = models.load(call, torch.device("cpu"), "sdpa")
        query = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer")
        self.assertEqual(query.weight.dtype, torch.uint8)
        trained = [value for value in model.parameters() if value.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        tokens = torch.arange(24)[None]
        losses = []
        for _ in range(4):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        self.assertLess(losses[-1], losses[0])
        with unittest.mock.patch("importlib.util.find_spec", lambda name: None):
            with self.assertRaisesRegex(Refused, "lora.quantize is nf4.*pip install bitsandbytes"):
                models.load(call, torch.device("cpu"), "sdpa")

    def test_the_text_part_of_a_model_with_images_trains_as_a_part_of_it(self):
        path, cpu = os.path.join(GOLDENS, "gemma3-images-tiny"), torch.device("cpu")
        lora = types.SimpleNamespace(
            r=2, alpha=4, target_modules=SEVEN, dropout=0.0, freeze_a=False, quantization="NONE"
        )
        call = types.SimpleNamespace(
            training=types.SimpleNamespace(lora=lora), resume=None, base=path, base_name="base",
            seed=1, slice=None, adapter=None, random_init=False,
            policy=types.SimpleNamespace(dtype="f32"),
        )  # fmt: skip
        tokens = torch.arange(24)[None]
        logits = lambda model: model.eval()(input_ids=tokens).logits.detach()
        whole = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = models.load(call, cpu, "sdpa")
        self.assertTrue(torch.equal(logits(model), logits(whole)))
        trained = [value for name, value in model.named_parameters() if "lora_B" in name]
        for value in trained:
            torch.nn.init.normal_(value)
        expected = logits(model)
        self.assertFalse(torch.allclose(expected, logits(whole), atol=1e-2))
        with tempfile.TemporaryDirectory() as directory:
            saved, out = os.path.join(directory, "saved"), os.path.join(directory, "out")
            model.save_pretrained(saved)
            saving.split(saved, out, call, None, True)
            call.adapter = os.path.join(out, saving.CHECKPOINT)
            self.assertTrue(torch.equal(logits(models.load(call, cpu, "sdpa")), expected))
            for value in trained:
                torch.nn.init.zeros_(value)
            call.slice = types.SimpleNamespace(start=call.adapter)
            self.assertTrue(torch.equal(logits(models.restart(model, call)), expected))
            # As PEFT's users load it.
            adapted = peft.PeftModel.from_pretrained(whole, call.adapter)
            self.assertTrue(torch.allclose(logits(adapted), expected, atol=1e-5))

    def test_all_weights_of_a_text_part_are_saved_as_a_text_model(self):
        path, cpu = os.path.join(GOLDENS, "gemma3-images-tiny"), torch.device("cpu")
        options = lambda: {"dtype": torch.float32, "attn_implementation": "sdpa"}
        model = models._load_base(path, options(), cpu, False)
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            self.assertEqual(models.read_config(directory).model_type, "gemma3_text")
            again = models._load_base(directory, options(), cpu, False)
        for name, value in again.named_parameters():
            self.assertTrue(torch.equal(value, model.get_parameter(name)), name)

    def test_names_of_experts_alone_are_refused(self):
        path = os.path.join(GOLDENS, "qwen3moe-tiny")
        model = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)
        with self.assertRaises(Refused) as refused:
            models.target_modules(model, ["gate_proj", "down_proj"])
        for part in ("gate_proj, down_proj are only in", "k_proj, o_proj, q_proj, v_proj"):
            self.assertIn(part, str(refused.exception))
        self.assertNotIn("lm_head", str(refused.exception))
        self.assertEqual(models.target_modules(model, ["gate_proj", "q_proj"]), ["q_proj"])

    def test_a_model_without_known_modules_gets_adapters_everywhere(self):
        config = transformers.GPTNeoXConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=32,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config)
        self.assertEqual(models.target_modules(model, SEVEN), "all-linear")


if __name__ == "__main__":
    unittest.main()
