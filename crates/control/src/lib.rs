//! Meristem control.
