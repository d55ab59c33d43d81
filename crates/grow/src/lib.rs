//! Meristem grow.
