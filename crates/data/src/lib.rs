//! Meristem data.
