//! Tests of the engine's internals: settings and faults that are not public.

mod blocking;
mod naive;
