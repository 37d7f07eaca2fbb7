"""The training itself: Hugging Face's Trainer, one optimizer step at a time."""

import dataclasses
import math
import os
import statistics
import sys
import time

import peft
import torch
import transformers
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback

from . import canary, examples, models, order, packing, saving, schedule
from .errors import Refused

# What produced a checkpoint.
ENGINE = (
    f"pytorch-{torch.__version__}+transformers-{transformers.__version__}+peft-{peft.__version__}"
)

# Loading and saving: disks and networks are slow at another scale than steps are.
PHASE_LIMIT_S = 1800.0

# A step that takes so many times the usual, and at least so long, is a hang.
STEP_TIMES_USUAL = 10
STEP_LIMIT_MIN_S = 300.0
STEPS_REMEMBERED = 16

ADAM_EPSILON = 1e-8

# Of a state: with it changes what a step is, and older states are not gone on from.
FORMAT = 2


class Training:
    """One call, from files to files."""

    def __init__(self, call, respond, signs, stop):
        self.call, self.respond, self.signs, self.stop = call, respond, signs, stop
        self.began = time.monotonic()
        self.has_begun = False

    def run(self):
        """The step at which SIGTERM stopped it, or None when it is done."""
        os.makedirs(self._scratch(), exist_ok=True)
        refused = None
        if self.call.resume:
            try:
                return self._attempt(None)
            except Exception as error:
                # Starting over only takes longer. Behind a step it is no longer the resume's fault.
                if self.has_begun:
                    raise
                refused = f"{type(error).__name__}: {error}"
                self.call.resume = None
        return self._attempt(refused)

    def _scratch(self, *parts):
        return os.path.join(self.call.out, ".trainer", *parts)

    def _attempt(self, refused):
        self.signs.phase(PHASE_LIMIT_S)
        call, resume = self.call, self.call.resume
        where = models.device(call.policy)
        config = transformers.AutoConfig.from_pretrained(call.base, local_files_only=True)
        sequences = self._sequences(config)
        training = call.training
        attention = packing.attention(config, call.policy) if training.packing else None
        per_epoch = order.steps_per_epoch(len(sequences), training.batch_size)
        steps = training.max_steps or training.epochs * per_epoch
        identity = self._identity(len(sequences), steps)
        joined = saving.join(resume, identity, self._scratch("resume")) if resume else None
        model = models.load(call, where, attention or call.policy.attention)
        run = Run(self, steps, identity, refused, sequences.skipped)
        loader = torch.utils.data.DataLoader(
            sequences,
            batch_sampler=order.Steps(len(sequences), training.batch_size, steps, call.seed),
            collate_fn=examples.Parts(call.pass_tokens(), packed=attention is not None),
            num_workers=call.policy.dataloader_workers,
            pin_memory=call.policy.pin_memory and where.type != "cpu",
            # Its own, so that looking at the data draws no random number of the training's.
            generator=torch.Generator(),
        )
        trainer = StepTrainer(
            model=model,
            args=arguments(call, self._scratch(), steps, where),
            optimizers=_optimizer(model, training, steps),
            callbacks=[run],
            loader=loader,
            dropout_seed=call.seed if training.lora and training.lora.dropout else None,
        )
        run.trainer = trainer
        if call.canary:
            run.canary = self._canary(config, attention is not None)
        forbid_eval(trainer)
        trainer.train(resume_from_checkpoint=joined)
        return run.stopped_at

    def _sequences(self, config):
        call = self.call
        return examples.Sequences(
            examples.read(call.dataset),
            examples.load_tokenizer(call.base),
            examples.end_token(call.base),
            config.vocab_size,
            call.training.max_tokens,
            config.max_position_embeddings,
        )

    def _canary(self, config, packed):
        tokenizer = examples.load_tokenizer(self.call.base)
        sequence = canary.read(tokenizer, self.call.canary, config.max_position_embeddings)
        return lambda trainer: canary.score(trainer, sequence, packed)

    def _identity(self, count, steps):
        """Everything but the weights that what follows depends on."""
        training = dataclasses.asdict(self.call.training)
        # How often it is saved changes nothing.
        training.pop("save_every")
        names = {
            "format": FORMAT, "engine": "pytorch", "base": self.call.base_name, "examples": count,
        }  # fmt: skip
        return {**names, "steps": steps, "seed": self.call.seed, **training}


class StepTrainer(Trainer):
    """Takes a whole optimizer step's batch at once and cuts it into passes by tokens. The loss
    is the mean over the step's scored tokens, however it is cut. It cannot evaluate."""

    def __init__(self, *, loader, dropout_seed=None, **options):
        super().__init__(train_dataset=loader.dataset, **options)
        self.loader, self.dropout_seed = loader, dropout_seed
        self.step_loss, self.step_norm, self.step_counts = 0.0, 0.0, {}
        self._clip = self.accelerator.clip_grad_norm_
        self.accelerator.clip_grad_norm_ = self._clip_and_tell

    def get_train_dataloader(self):
        return self.loader

    def _clip_and_tell(self, *arguments, **options):
        """The Trainer tells nobody of the norm it clipped at."""
        norm = self._clip(*arguments, **options)
        self.step_norm = float(norm)
        return norm

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        if self.dropout_seed is not None:
            # What is dropped follows from the step, so that a training that goes on drops the same.
            text = f"dropout {self.dropout_seed} {self.state.global_step}"
            torch.manual_seed(order.blake3_u64(text) >> 1)
        parts = inputs["parts"]
        counted = ("tokens", "scored", "places")
        self.step_counts = {name: sum(part[name] for part in parts) for name in counted}
        scored = self.step_counts["scored"]
        total = torch.zeros((), device=self.args.device)
        for part in parts:
            part = self._prepare_inputs(part)
            with self.compute_loss_context_manager():
                loss = _summed_loss(model, part) / max(scored, 1)
            self.accelerator.backward(loss)
            total += loss.detach()
        self.step_loss = float(total)
        return total

    def floating_point_ops(self, inputs):
        return 0

    def evaluate(self, *_args, **_options):
        raise Refused("this trainer never evaluates; evaluators measure its checkpoints")

    evaluation_loop = predict = get_eval_dataloader = evaluate


def _summed_loss(model, part):
    return _of_row(model, part) if "layout" in part else _of_rows(model, part)


def _of_row(model, part):
    """Of sequences one after another."""
    logits = packing.row_logits(model, part)
    return torch.nn.functional.cross_entropy(logits.float(), part["targets"], reduction="sum")


def _of_rows(model, part):
    """Of a sequence a row, padded. Logits as of one row, from the first place one needs."""
    labels = part["labels"]
    scored = (labels != examples.IGNORED).any(dim=0).nonzero()
    first = int(scored[0]) if len(scored) else labels.shape[1] - 1
    keep = labels.shape[1] - max(first - 1, 0)
    logits = model(
        input_ids=part["input_ids"],
        attention_mask=part["attention_mask"],
        logits_to_keep=keep,
        use_cache=False,
    ).logits
    # The last place predicts nothing that is there.
    logits, targets = logits[:, -keep:-1].float(), labels[:, 1 - keep :]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=examples.IGNORED, reduction="sum"
    )


class Run(TrainerCallback):
    """Counts, saves, reports and stops, at the end of each step."""

    def __init__(self, training, steps, identity, refused, skipped):
        self.training, self.call = training, training.call
        self.steps, self.identity = steps, identity
        self.refused, self.skipped = refused, skipped
        self.trainer, self.canary = None, None
        resume = self.call.resume
        self.tokens = resume.tokens if resume else 0
        self.trained_tokens = resume.trained_tokens if resume else 0
        self.spent = resume.wall_s if resume else 0.0
        self.durations = []
        self._begin_stretch()
        self.stopped_at = None
        save_every = self.call.training.save_every
        if save_every > steps:
            print(
                f"save_every {save_every} is more than the {steps} steps there are; "
                "saving by time",
                file=sys.stderr,
            )
        self.cadence = schedule.Cadence(
            steps, save_every, self.call.policy.save_s, time.monotonic(), bool(resume)
        )

    def _begin_stretch(self):
        """What is told is of the steps since the last saved one."""
        self.losses, self.norms = [], []
        self.stretch_tokens, self.stretch_places = 0, 0

    def on_train_begin(self, args, state, control, **_):
        step = self.call.resume.step if self.call.resume else 0
        if state.global_step != step:
            raise Refused(f"the Trainer would go on behind step {state.global_step}, not {step}")
        self.training.has_begun = True
        self.training.stop.training = True
        begun = {
            "step": step, "refused": self.refused, "engine": ENGINE, "skipped": self.skipped,
        }  # fmt: skip
        self.training.respond.progress({"begun": begun})
        if self.training.stop.asked:
            # The Trainer looks for its own signs only at the end of a step.
            raise Stopped(step)

    def on_step_begin(self, args, state, control, **_):
        self.step_began = time.monotonic()
        usual = statistics.median(self.durations) if self.durations else 0.0
        # The first step compiles kernels.
        limit = max(STEP_TIMES_USUAL * usual, STEP_LIMIT_MIN_S)
        self.training.signs.phase(limit if self.durations else PHASE_LIMIT_S)

    def on_step_end(self, args, state, control, **_):
        step, now = state.global_step, time.monotonic()
        self.durations = [*self.durations[1 - STEPS_REMEMBERED :], now - self.step_began]
        self._count(step)
        due = self.cadence.due(step, now)
        if self.training.stop.asked and step < self.steps:
            self.stopped_at = step
            control.should_training_stop = True
            due = True
        if due:
            self._check_weights(step)
            self.training.signs.phase(PHASE_LIMIT_S)
            saving.await_publishing(self.call.out)
            control.should_save = True
        else:
            self._report(step, None)

    def on_save(self, args, state, control, **_):
        step = state.global_step
        saved = os.path.join(args.output_dir, f"checkpoint-{step}")
        directory = os.path.join(self.call.out, str(step))
        saving.split(saved, directory, self.call, self.identity, step == self.steps)
        self.cadence.saved(time.monotonic())
        self._report(step, directory)
        self._begin_stretch()

    def _count(self, step):
        loss, norm = self.trainer.step_loss, self.trainer.step_norm
        if not math.isfinite(loss):
            raise Refused(f"the loss of step {step} is {loss}; lower training.learning_rate")
        # In f16 it overflows now and then: the step is left out and the scale lowered.
        if math.isfinite(norm):
            self.norms.append(norm)
        elif self.call.policy.dtype != "f16":
            raise Refused(
                f"the norm of the gradient of step {step} is {norm}; lower training.learning_rate"
            )
        counts = self.trainer.step_counts
        self.losses.append(loss)
        self.tokens += counts["tokens"]
        self.trained_tokens += counts["scored"]
        self.stretch_tokens += counts["tokens"]
        self.stretch_places += counts["places"]

    def _report(self, step, saved):
        training = self.call.training
        rate = training.learning_rate * schedule.factor(step, self.steps, training)
        report = {
            "step": step,
            "steps": self.steps,
            "loss": statistics.fmean(self.losses),
            "learning_rate": rate,
            "grad_norm": statistics.fmean(self.norms) if self.norms else 0.0,
            "grad_norm_max": max(self.norms, default=0.0),
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "packing": self.stretch_tokens / self.stretch_places,
            "wall_s": self.spent + time.monotonic() - self.training.began,
            "saved": saved,
        }
        if self.canary and step == self.steps:
            report["canary"] = self.canary(self.trainer)
        self.training.respond.progress({"step": report})

    def _check_weights(self, step):
        """A gradient that overflowed shows in the weights, not yet in the loss."""
        trained = (p for p in self.trainer.model.parameters() if p.requires_grad)
        if not all(bool(torch.isfinite(parameter).all()) for parameter in trained):
            raise Refused(
                f"the weights after step {step} are not finite; lower training.learning_rate"
            )


class Stopped(Exception):
    """SIGTERM came before the first step."""

    def __init__(self, step):
        super().__init__(step)
        self.step = step


def arguments(call, directory, steps, where):
    """The Trainer's settings: nothing of it evaluates, logs elsewhere or saves by itself."""
    policy, training = call.policy, call.training
    return transformers.TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=training.batch_size,
        # A step's batch comes as one and is cut by tokens.
        gradient_accumulation_steps=1,
        max_grad_norm=training.max_grad_norm,
        seed=call.seed % 2**32,
        use_cpu=where.type == "cpu",
        bf16=policy.dtype == "bf16",
        fp16=policy.dtype == "f16",
        **_recomputation(policy),
        eval_strategy="no",
        eval_on_start=False,
        load_best_model_at_end=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )


def _recomputation(policy):
    """Renamed in transformers 5."""
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    name = "activation_checkpointing"
    name = name if name in known else "gradient_checkpointing"
    return {name: policy.gradient_checkpointing, f"{name}_kwargs": {"use_reentrant": False}}


def forbid_eval(trainer):
    """Evaluation beside a training is what hangs boxes of unified memory: refused, whatever way
    it may have been switched on."""
    args = trainer.args
    callbacks = trainer.callback_handler.callbacks
    found = {
        "eval_strategy": str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no",
        "do_eval": args.do_eval,
        "eval_on_start": args.eval_on_start,
        "load_best_model_at_end": args.load_best_model_at_end,
        "metric_for_best_model": args.metric_for_best_model is not None,
        "eval_dataset": trainer.eval_dataset is not None,
        "compute_metrics": trainer.compute_metrics is not None,
        "EarlyStoppingCallback": any(isinstance(one, EarlyStoppingCallback) for one in callbacks),
    }
    switched_on = [name for name, on in found.items() if on]
    if switched_on:
        raise Refused(
            f"{switched_on[0]} is set: this trainer never evaluates; evaluators measure its "
            "checkpoints"
        )
    trainer.remove_callback(PrinterCallback)


def _optimizer(model, training, steps):
    """AdamW with decoupled decay of matrices only, and the embedded engine's schedule."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=ADAM_EPSILON,
    )
    # The scheduler counts the steps that were taken; a rate belongs to the step about to be.
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda taken: schedule.factor(min(taken + 1, steps), steps, training)
    )
    return optimizer, rates
