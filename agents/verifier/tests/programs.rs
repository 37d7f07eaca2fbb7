//! What models write, judged by running it: in a real sandbox, with this box's own tools.

#[path = "programs/humaneval.rs"]
mod humaneval;
#[path = "programs/native.rs"]
mod native;
#[path = "programs/python.rs"]
mod python;
#[path = "programs/rig.rs"]
mod rig;
