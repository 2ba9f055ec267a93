//! The codec from outside, by address.

mod backends;
mod common;
mod contract;
mod corpus;
mod head;
mod misuse;
mod replay;
