//! Meristem.
