//! What people look at: a run as it goes, and the fleet with its runs, folded from facts and from
//! what agents say of themselves. Each gives what changed since it was last asked, so that those
//! who look get little again and again. What a run is, `cycle` says; here it is only retold.
//!
//! Knows no bus, clock, page or terminal.

mod eta;
mod fleet;
mod histogram;
mod lanes;
mod run;
mod tally;

pub use fleet::Fleet;
pub use run::Board;
