//! The names of roles in statuses, logs and messages.

use wire::WorkKind;

/// Returns the user-visible name of the role that does a kind of work.
pub(crate) fn role_name(kind: WorkKind) -> &'static str {
    match kind {
        WorkKind::Generate => "generator",
        WorkKind::Verify => "verifier",
        WorkKind::Score => "scorer",
        WorkKind::Train => "trainer",
        WorkKind::Eval => "evaluator",
    }
}
