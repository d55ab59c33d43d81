//! Tests of the engine from inside: settings and faults that no program can ask for.

mod blocking;
mod naive;
