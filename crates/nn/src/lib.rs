//! Meristem nn.
