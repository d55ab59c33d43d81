//! The `meristem` command.
fn main() {}
