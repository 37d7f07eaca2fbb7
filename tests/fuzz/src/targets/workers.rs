//! Messages between workers and agents, and the output of verifiers.

/// A line of a worker's stdin or stdout.
pub(super) fn lines(input: &[u8]) {
    let read = [agent::fuzzing::parse_answer(input), agent::fuzzing::parse_request(input)];
    for value in read.into_iter().flatten() {
        evaluator::fuzzing::calls(&value);
        generator::fuzzing::calls(&value);
        trainer::fuzzing::calls(&value);
        verifier::fuzzing::calls(&value);
    }
}

/// The output of a `command` verifier.
pub(super) fn verdicts(input: &[u8]) {
    verifier::fuzzing::fuzz_answer(input);
}

/// Arbitrary completions and answers for all other verifiers.
pub(super) fn judges(input: &[u8]) {
    if let Ok(call) = serde_json::from_slice(input) {
        verifier::fuzzing::fuzz_judge(&call);
    }
}

/// The body of a request to a served model.
pub(super) fn requests(input: &[u8]) {
    completion_server::fuzzing::read_body(input);
}
