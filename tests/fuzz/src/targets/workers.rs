//! What workers and agents write to each other, and what verifiers print.

/// A line of a worker's stdin or stdout, as agent and worker read it.
pub(super) fn lines(input: &[u8]) {
    let read = [agent::fuzzing::parse_answer(input), agent::fuzzing::parse_request(input)];
    for value in read.into_iter().flatten() {
        evaluator::fuzzing::calls(&value);
        generator::fuzzing::calls(&value);
        trainer::fuzzing::calls(&value);
        verifier::fuzzing::calls(&value);
    }
}

/// What a `command` verifier prints.
pub(super) fn verdicts(input: &[u8]) {
    verifier::fuzzing::fuzz_answer(input);
}

/// Completions and answers that somebody else wrote, before every other verifier.
pub(super) fn judges(input: &[u8]) {
    if let Ok(call) = serde_json::from_slice(input) {
        verifier::fuzzing::fuzz_judge(&call);
    }
}
