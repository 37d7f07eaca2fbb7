"""Tests that objectives have the gradients of TRL's losses, on the parameters of a small model in
f32."""

import os
import tempfile
import unittest

import pyarrow
import torch
import transformers
from datasets import Dataset
from datasets.table import InMemoryTable
from flotilla_trainer.objectives import Objective, Signal, Totals
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl import SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

GOLDEN = os.path.join(os.path.dirname(__file__), "../../../../tests/golden/data/hf/qwen2-tiny")

# Four sequences of one prompt token and eight drawn ones. Chosen and rejected ones alternate.
SEQUENCES, LENGTH = 4, 8
ADVANTAGES = (1.0, -0.5, 0.7, -1.2)
TOLERANCE = 1e-5


def dataset(**row):
    """Returns a dataset that the trainers ask for and never read. The fingerprint is given, because
    computing it fails with some versions of Python."""
    table = pyarrow.table({name: [value] * 8 for name, value in row.items()})
    return Dataset(InMemoryTable(table), fingerprint="unused")


class Gradients(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN, dtype=torch.float32)
        cls.tokenizer = transformers.AutoTokenizer.from_pretrained(GOLDEN)
        cls.tokenizer.pad_token = cls.tokenizer.pad_token or cls.tokenizer.eos_token
        generator = torch.Generator().manual_seed(3)
        shape = (SEQUENCES, 1 + LENGTH)
        cls.tokens = torch.randint(40, 200, shape, generator=generator)
        cls.now = cls.logprobs(cls).detach()
        cls.old = cls.now + 0.6 * (torch.rand(cls.now.shape, generator=generator) - 0.5)
        cls.reference = cls.now - 0.3 * torch.rand(cls.now.shape, generator=generator)

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    def logprobs(self):
        logits = self.model(self.tokens).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, self.tokens[:, 1:, None]).squeeze(-1)

    def gradient(self, loss):
        self.model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def weighted(self, objective, advantages):
        """Returns the gradient of the tokens' losses, each multiplied by its weight."""
        doubles = [values.double() for values in (self.now, self.old, self.reference)]
        every = [(Signal(advantage, old, reference), now)
                 for advantage, now, old, reference in zip(advantages, *doubles)]  # fmt: skip
        totals = Totals(SEQUENCES, SEQUENCES * LENGTH, 0.0)
        weights = []
        for start in range(0, SEQUENCES, objective.unit):
            found = objective.weigh(every[start : start + objective.unit], totals)
            weights += [weights for weights, *_ in found]
        return self.gradient(-(torch.stack(weights).float() * self.logprobs()).sum())

    def expect_gradient(self, name, settings, loss, scale=1.0, advantages=ADVANTAGES):
        theirs = self.gradient(loss())
        ours = scale * self.weighted(Objective(name, settings), advantages)
        apart = float((ours - theirs).norm() / theirs.norm())
        self.assertGreater(float(theirs.norm()), 1e-4, name)
        self.assertLess(apart, TOLERANCE, f"{name}: the gradients are {apart} apart")

    def options(self):
        return {
            "output_dir": self.scratch.name, "report_to": "none", "use_cpu": True, "bf16": False,
            "per_device_train_batch_size": SEQUENCES, "gradient_checkpointing": False,
        }  # fmt: skip

    def prompts(self):
        return dataset(prompt="a")

    def reinforcement(self, kind, config, **settings):
        trainer = kind(
            model=self.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config(**self.options(), num_generations=4, **settings),
            train_dataset=self.prompts(),
            processing_class=self.tokenizer,
        )
        trainer.model.eval()
        return trainer

    def drawn(self):
        mask = torch.ones(SEQUENCES, LENGTH, dtype=torch.long)
        return {
            "prompt_ids": self.tokens[:, :1], "prompt_mask": mask[:, :1],
            "completion_ids": self.tokens[:, 1:], "completion_mask": mask,
            "advantages": torch.tensor(ADVANTAGES),
            "num_items_in_batch": torch.tensor(SEQUENCES * LENGTH),
        }  # fmt: skip

    def test_group_objectives(self):
        for name, theirs, ours in [
            ("grpo", {"loss_type": "grpo"}, {}),
            ("grpo", {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
             {"kl": 0.3}),
            ("dr_grpo", {"loss_type": "dr_grpo", "max_completion_length": 9}, {"max_tokens": 9}),
            ("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}, {}),
            ("cispo", {"loss_type": "cispo", "epsilon_high": 1.1}, {"max_ratio": 1.1}),
            ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence",
                      "epsilon": 3e-4, "epsilon_high": 4e-4}, {}),
        ]:  # fmt: skip
            theirs = {"epsilon": 0.2, "beta": 0.0, **theirs}
            trainer = self.reinforcement(GRPOTrainer, GRPOConfig, **theirs)
            inputs = {
                **self.drawn(),
                "old_per_token_logps": self.old,
                "ref_per_token_logps": self.reference,
            }
            self.expect_gradient(name, ours, lambda: trainer._compute_loss(self.model, inputs))

    def test_rloo(self):
        trainer = self.reinforcement(RLOOTrainer, RLOOConfig, beta=0.0)
        inputs = {**self.drawn(), "old_logps": self.now.sum(-1)}
        self.expect_gradient("rloo", {}, lambda: trainer._compute_loss(self.model, inputs))

    def pairs(self, kind, config, **settings):
        trainer = kind(
            model=self.model,
            args=config(**self.options(), **settings),
            train_dataset=dataset(prompt="a", chosen="b", rejected="c"),
            processing_class=self.tokenizer,
        )
        trainer.model.eval()
        return trainer

    def test_dpo(self):
        trainer = self.pairs(DPOTrainer, DPOConfig, beta=0.1, precompute_ref_log_probs=True)
        both = torch.cat([self.tokens[0::2], self.tokens[1::2]])
        completion = torch.ones_like(both)
        completion[:, 0] = 0
        reference = self.reference.sum(-1)
        inputs = {
            "input_ids": both, "attention_mask": torch.ones_like(both),
            "completion_mask": completion,
            "ref_chosen_logps": reference[0::2], "ref_rejected_logps": reference[1::2],
        }  # fmt: skip
        self.expect_gradient("dpo", {}, lambda: trainer._compute_loss(self.model, inputs, False))

    def preferences(self):
        batch = {}
        for side, tokens in (("chosen", self.tokens[0::2]), ("rejected", self.tokens[1::2])):
            labels = tokens.clone()
            labels[:, 0] = -100
            batch[f"{side}_input_ids"], batch[f"{side}_labels"] = tokens, labels
            batch[f"{side}_attention_mask"] = torch.ones_like(tokens)
        return batch

    def test_simpo_and_orpo(self):
        simpo = self.pairs(
            CPOTrainer, CPOConfig, loss_type="simpo", beta=2.5, simpo_gamma=1.375, cpo_alpha=0.0
        )
        orpo = self.pairs(ORPOTrainer, ORPOConfig, beta=0.1)
        for name, trainer in (("simpo", simpo), ("orpo", orpo)):
            self.expect_gradient(
                name,
                {},
                lambda: trainer.get_batch_loss_metrics(self.model, self.preferences())[0],
            )

    def test_dft(self):
        trainer = SFTTrainer(
            model=self.model,
            args=SFTConfig(**self.options(), loss_type="dft"),
            train_dataset=dataset(prompt="a", completion="b"),
            processing_class=self.tokenizer,
        )
        trainer.model.eval()
        labels = self.tokens.clone()
        labels[:, 0] = -100
        inputs = {
            "input_ids": self.tokens, "attention_mask": torch.ones_like(labels), "labels": labels,
        }  # fmt: skip
        # TRL's loss is a mean over tokens, the paper's is one over sequences.
        self.expect_gradient(
            "dft",
            {},
            lambda: trainer.compute_loss(self.model, dict(inputs)),
            scale=1 / LENGTH,
            advantages=(1.0,) * SEQUENCES,
        )
