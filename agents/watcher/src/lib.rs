//! Watches a directory where a training that knows nothing of Flotilla saves checkpoints, and
//! publishes each as soon as it is complete.
//!
//! `readiness` decides whether a directory is complete and `lookout` takes hold of it before
//! the trainer removes it again; `watch` publishes what they hold. Who trains, and with what, is
//! nobody's business here.

mod base;
mod files;
mod hints;
mod lookout;
mod readiness;
mod safetensors;
mod scan;
mod stage;
mod trainer_state;
mod watch;

pub use files::Content;
pub use lookout::{Lookout, Memory, Policy};
pub use readiness::step_of;
pub use stage::Held;
pub use trainer_state::{Figures, TrainerState};
pub use watch::{Begin, Config, Finding, watch};
