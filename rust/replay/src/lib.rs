//! What drives a prefix cache, for tests, fuzzing and measurements.
//!
//! [`Op`] is a call as data; [`decode`] reads calls from any bytes. [`Scheduler`] serves requests
//! through an [`Engine`]: [`Sequences`] lets the cache hand out pages and slots, [`Leases`] has
//! allocators of its own and a fake device that knows what every row holds. [`Replay`] serves what was
//! recorded of real requests, to compare policies; its example prints the figures.

pub mod decode;
mod device;
mod leases;
mod op;
mod owner;
mod random;
mod scheduler;
mod sequences;
mod serve;

pub use leases::Leases;
pub use op::{Depth, Op, Wrong};
pub use owner::{Owner, Sharing, Who};
pub use random::Random;
pub use scheduler::{End, Engine, Habits, Running, Scheduler, Seen, Waiting};
pub use sequences::Sequences;
pub use serve::{BLOCK, Recorded, Replay, Totals};
