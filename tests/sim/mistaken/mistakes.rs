/// A mistake in the source of a core, as a programmer might make it: an expression of a file that
/// becomes another one.
struct CoreMistake {
    /// What the core then does.
    name: &'static str,
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
}

const CORE_MISTAKES: [CoreMistake; 18] = [
    CoreMistake {
        name: "samples of another policy count",
        file: "services/cycle/src/fold.rs",
        right: "samples.base != policy.base.manifest \
                || samples.adapter != policy.adapter_manifest()",
        wrong: "false",
    },
    CoreMistake {
        name: "samples of a quarantined agent count",
        file: "services/cycle/src/fold/quarantine.rs",
        right: "cycle.replace_job(&id, replacement, round)",
        wrong: "drop(replacement)",
    },
    CoreMistake {
        name: "a failure after the result sets a job aside",
        file: "services/cycle/src/fold.rs",
        right: "missing && job.set_aside.is_none()",
        wrong: "job.set_aside.is_none()",
    },
    CoreMistake {
        name: "late results of an archived cycle count",
        file: "services/cycle/src/fold.rs",
        right: "subject.key.is_bulky() && self.is_archived(&subject.key)",
        wrong: "false",
    },
    CoreMistake {
        name: "orders of a job are not counted",
        file: "services/cycle/src/state.rs",
        right: "self.orders_in_round.saturating_add(1)",
        wrong: "1",
    },
    CoreMistake {
        name: "a paused run orders work",
        file: "services/cycle/src/planner.rs",
        right: "run.is_halted()",
        wrong: "false",
    },
    CoreMistake {
        name: "a slice that is closed is trained again",
        file: "services/cycle/src/split_training/fold.rs",
        right: "self.counted.add_range(delta.first..delta.first.saturating_add(delta.steps))",
        wrong: "true",
    },
    CoreMistake {
        name: "a run ends before its last evaluation",
        file: "services/cycle/src/outcome.rs",
        right: "run.cycles.get(&number).is_some_and(|cycle| cycle.done.is_some())",
        wrong: "run.cycles.get(&number).is_some_and(|cycle| cycle.final_checkpoint().is_some())",
    },
    CoreMistake {
        name: "a run moves its channel away from a newer model",
        file: "services/cycle/src/channels.rs",
        right: "*ended > since",
        wrong: "true",
    },
    CoreMistake {
        name: "a channel is moved by a decision on an earlier move",
        file: "services/cycle/src/channels.rs",
        right: "last != number",
        wrong: "false",
    },
    CoreMistake {
        name: "a forgotten channel is rolled back",
        file: "services/cycle/src/channels.rs",
        right: "found.1.names_model()",
        wrong: "true",
    },
    CoreMistake {
        name: "a channel is rolled back to the model that it names",
        file: "services/cycle/src/channels.rs",
        right: "!fact.has_model_of(last)",
        wrong: "true",
    },
    CoreMistake {
        name: "two runs learn from a channel at once",
        file: "services/cycle/src/channels.rs",
        right: "!self.is_open && self.tried < feedback",
        wrong: "true",
    },
    CoreMistake {
        name: "a channel's model is compared as another one",
        file: "services/cycle/src/channels.rs",
        right: "base.tree == before.base && base.adapter == before.adapter",
        wrong: "true",
    },
    CoreMistake {
        name: "a fork takes over what later cycles have begun",
        file: "services/cycle/src/fork.rs",
        right: "number <= cycle",
        wrong: "true",
    },
    CoreMistake {
        name: "a redelivered job runs twice at the same time",
        file: "agents/agent-core/src/admission.rs",
        right: "in_flight == InFlightState::SameDelivery",
        wrong: "false",
    },
    CoreMistake {
        name: "orders of earlier rounds are done",
        file: "agents/agent-core/src/admission.rs",
        right: "round < status.round || (status.paused && round <= status.round)",
        wrong: "status.paused && round <= status.round",
    },
    CoreMistake {
        name: "jobs of ended runs are done",
        file: "agents/agent-core/src/run_status.rs",
        right: "status.is_over || gone",
        wrong: "gone",
    },
];
