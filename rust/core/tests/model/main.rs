//! Operations on the cache and on a naive one: equal results, equal pools, equal counters, equal
//! eviction order, and a clean `check()` after every step.

mod corpus;
mod differential;
mod oracle;
mod promises;
mod proptests;
mod recorded;
mod replay;
mod soak;
