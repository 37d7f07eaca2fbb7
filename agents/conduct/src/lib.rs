//! An agent's pure core: what it does with a job it is handed, what it writes when the
//! job fails, and what it does with itself when jobs keep failing.
//!
//! Knows nothing of NATS, tokio, clocks, processes or models. `runtime` is its shell; the
//! simulator drives it as well.

mod course;
mod failing;
mod halving;
mod pace;
mod placing;
mod reception;
mod standing;
mod temper;

pub use course::{Course, Courses};
pub use failing::{Blow, Fault, Then, errors_stand, failure, owed, then};
pub use halving::halved;
pub use pace::{Pace, leaves};
pub use placing::{Peer, Placing, Room, place};
pub use reception::{AtHand, PASS_ON_MS, Reception, poison, receive};
pub use standing::Standing;
pub use temper::{Rest, Temper};
