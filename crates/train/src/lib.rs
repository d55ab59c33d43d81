//! Meristem train.
