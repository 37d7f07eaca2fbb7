//! A cell of its own, for tests of this crate and of those that use it.

fn main() {
    sandbox::serve_cell()
}
