//! Meristem device.
