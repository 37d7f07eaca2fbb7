"""Tests that a packed step has the same loss and gradients as its examples one by one."""

import types
import unittest

import torch
import transformers
from flotilla_trainer import examples, packing, training

SEQUENCES = [
    ([7, 3, 9, 11, 2, 5, 8, 1, 4, 6], range(4, 10)), ([5, 2, 9], range(1, 3)),
    ([1, 8, 8, 3, 7, 2, 9, 4], range(6, 8)), ([6, 2], range(1, 2)),
    # An episode, of which two parts were drawn.
    ([3, 4, 5, 6, 7, 8, 9, 10, 11], [2, 3, 6, 7, 8]),
]  # fmt: skip


def policy(attention):
    return types.SimpleNamespace(attention=attention)


def model(kind, attention, recomputing=False):
    """Returns a model of two layers, with large weights so that attention has a large effect."""
    config = transformers.CONFIG_MAPPING[kind](
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        initializer_range=0.4, sliding_window=None, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    transformers.set_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if recomputing:
        made.gradient_checkpointing_enable({"use_reentrant": False})
    return made.train()


def step(made, parts):
    loss = sum(training._summed_loss(made, part) for part in parts)
    loss.backward()
    return float(loss), {name: p.grad for name, p in made.named_parameters()}


def split(sequences, tokens, packed):
    return examples.PassCollator(tokens, packed)(sequences)["parts"]


class Packing(unittest.TestCase):
    def expect_same(self, one, other):
        self.assertAlmostEqual(one[0], other[0], delta=1e-4)
        for name, gradient in one[1].items():
            self.assertGreater(float(gradient.abs().max()), 1e-5, name)
            torch.testing.assert_close(gradient, other[1][name], atol=1e-4, rtol=1e-4, msg=name)

    def test_loss_and_gradients_are_those_of_each_example_alone(self):
        for kind in packing.MODEL_TYPES:
            alone = step(model(kind, "eager"), split(SEQUENCES, 1, False))
            padded = step(model(kind, "sdpa"), split(SEQUENCES, 64, False))
            self.expect_same(alone, padded)
            for attention in ("sdpa", "eager"):
                for recomputing in (False, True):
                    made = model(kind, "sdpa", recomputing)
                    name = packing.attention(made.config, policy(attention))
                    made.set_attn_implementation(name)
                    parts = split(SEQUENCES, 64, True)
                    self.assertEqual(len(parts), 1)
                    self.expect_same(alone, step(made, parts))

    def test_only_completions_and_end_tokens_have_a_loss(self):
        tokens, places = SEQUENCES[0]
        made = model("qwen2", "sdpa")
        logits = made(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = -sum(float(logits[place - 1, tokens[place]]) for place in places)
        made.set_attn_implementation(packing.attention(made.config, policy("sdpa")))
        packed = split(SEQUENCES[:1], 64, True)
        self.assertAlmostEqual(float(training._summed_loss(made, packed[0])), expected, places=4)
        self.assertEqual(packed[0]["targets"].tolist(), tokens[places.start :])

    def test_other_kinds_of_attention_are_not_replaced(self):
        full = types.SimpleNamespace(model_type="qwen2", layer_types=["full_attention"] * 2)
        self.assertIsNotNone(packing.attention(full, policy("sdpa")))
        for change in ({"model_type": "gpt_oss"}, {"layer_types": ["sliding_attention"]}):
            other = types.SimpleNamespace(**{**vars(full), **change})
            self.assertIsNone(packing.attention(other, policy("sdpa")))

    def test_a_batch_has_sequences_of_similar_length(self):
        lengths = [100, 80, 75, 74, 60, 12, 9, 3, 1, 1]
        layout = packing.Layout(lengths)
        self.assertEqual([count for count, _ in layout.batches], [3, 2, 2, 1, 2])
        self.assertLess(len(layout.rows), sum(lengths) / packing.MIN_LENGTH_SHARE)
        self.assertEqual(len(set(layout.back.tolist())), sum(lengths))


class Tiny(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return SEQUENCES[index]


class Clipping(unittest.TestCase):
    def test_the_gradient_is_clipped_and_its_previous_norm_recorded(self):
        norms_after = []

        class RecordNorm(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **_):
                norms = [p.grad.norm() for p in model.parameters()]
                norms_after.append(float(torch.stack(norms).norm()))

        from .test_eval import trainer

        made = trainer(
            change=lambda args: setattr(args, "max_grad_norm", 0.01),
            callbacks=[RecordNorm()],
            loader=torch.utils.data.DataLoader(
                Tiny(), batch_size=1, collate_fn=examples.PassCollator(64, False)
            ),
            model=model("qwen2", "sdpa"),
        )
        made.train()
        self.assertAlmostEqual(norms_after[0], 0.01, places=5)
        self.assertGreater(made.step_norm, 0.1)


if __name__ == "__main__":
    unittest.main()
