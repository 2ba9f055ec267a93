//! How soon a prefix of some age is asked for again, learned from what was seen.

use super::history::{Class, History};

/// Ages count requests. Buckets widen by a factor of 2^(1/4).
const BUCKETS: usize = 80;
const QUARTERS: [f64; 4] = [
    1.0,
    1.189_207_115_002_721,
    std::f64::consts::SQRT_2,
    1.681_792_830_507_429,
];
/// Of prefixes of which nothing is known, one in fifty is asked for again in each bucket.
const HAZARD: f64 = 0.02;
/// Intervals that what is believed beforehand weighs as much as.
const PRIOR: f64 = 10.0;

type Buckets<T> = [T; BUCKETS];

/// Where a bucket past the first begins.
fn start_of(bucket: usize) -> f64 {
    let quarters = bucket - 1;
    QUARTERS[quarters % 4] * (1_u64 << (quarters / 4)) as f64
}

/// Bucket of an age: 0 for 0, else `floor(4 * log2(age)) + 1`, as far as there are buckets. Without
/// a logarithm, which two machines may round differently.
fn bucket(age: u64) -> usize {
    let Some(log) = age.checked_ilog2() else {
        return 0;
    };
    let first = 4 * log as usize + 1;
    if first + 3 >= BUCKETS {
        return BUCKETS - 1;
    }
    let reached = |quarter: &usize| start_of(first + quarter) <= age as f64;
    first + (1..4).take_while(reached).count()
}

/// Requests that pass in a bucket. Several narrow ones share one whole age.
fn width(bucket: usize) -> f64 {
    match bucket {
        0 => 1.0,
        _ => (start_of(bucket + 1) - start_of(bucket)).max(0.25),
    }
}

/// Hits for each request that a state is kept: the most over all spans from its age on.
#[derive(Debug, Clone)]
pub(super) struct Densities([Buckets<f64>; Class::ALL.len()]);

impl Default for Densities {
    /// Before anything is known, what is older is worth less.
    fn default() -> Self {
        let by_age = std::array::from_fn(|at| match at {
            0 => 1.0,
            _ => 1.0 / (1.0 + start_of(at)),
        });
        Self([by_age; Class::ALL.len()])
    }
}

impl Densities {
    /// Learns from all intervals that are remembered. A class of which little is known is believed
    /// to be like the others.
    pub(super) fn learn(history: &History) -> Self {
        let mut all = Counts::default();
        let mut classes = [Counts::default(); Class::ALL.len()];
        for (class, age, reused) in history.intervals() {
            let at = bucket(age);
            all.add(at, reused);
            classes[class as usize].add(at, reused);
        }
        let average = all.hazards(&[HAZARD; BUCKETS]);
        Self(classes.map(|counts| densities(&counts.hazards(&average))))
    }

    pub(super) fn of(&self, class: Class, age: u64) -> f64 {
        self.0[class as usize][bucket(age)]
    }
}

/// Intervals by the bucket in which they ended, or which they have come to.
#[derive(Debug, Clone, Copy)]
struct Counts {
    reused: Buckets<u32>,
    ended: Buckets<u32>,
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            reused: [0; BUCKETS],
            ended: [0; BUCKETS],
        }
    }
}

impl Counts {
    fn add(&mut self, bucket: usize, reused: bool) {
        self.ended[bucket] += 1;
        self.reused[bucket] += u32::from(reused);
    }

    /// Chance, for what has reached a bucket, to be asked for again in it.
    fn hazards(&self, prior: &Buckets<f64>) -> Buckets<f64> {
        let mut reached: u32 = self.ended.iter().sum();
        std::array::from_fn(|at| {
            let reused = f64::from(self.reused[at]) + PRIOR * prior[at];
            let hazard = reused / (f64::from(reached) + PRIOR);
            reached -= self.ended[at];
            hazard
        })
    }
}

fn densities(hazards: &Buckets<f64>) -> Buckets<f64> {
    std::array::from_fn(|now| {
        // Of those that are not asked for before `now`.
        let (mut waiting, mut kept, mut best) = (1.0_f64, 0.0_f64, 0.0_f64);
        for (at, hazard) in hazards.iter().enumerate().skip(now) {
            let after = waiting * (1.0 - hazard);
            kept += width(at) * (waiting + after) / 2.0;
            waiting = after;
            best = best.max((1.0 - waiting) / kept);
        }
        best
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_what_its_formula_says() {
        assert_eq!(bucket(0), 0);
        for age in 1_u64..200_000 {
            let formula = (4.0 * (age as f64).log2()).floor() as usize + 1;
            assert_eq!(bucket(age), formula.min(BUCKETS - 1), "{age}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    fn densities_of(age: u64, reused: bool) -> impl Fn(u64) -> f64 {
        let mut counts = Counts::default();
        (0..1_000).for_each(|_| counts.add(bucket(age), reused));
        let found = densities(&counts.hazards(&[HAZARD; BUCKETS]));
        move |age| found[bucket(age)]
    }

    #[test]
    fn what_comes_back_at_one_age_is_worth_most_just_before_it() {
        let at = densities_of(100, true);
        assert!(at(90) > 2.0 * at(50) && at(50) > 1.5 * at(5));
        assert!(at(200) < at(5), "what is late does not come");
    }

    #[test]
    fn what_never_comes_back_is_worth_little() {
        let (never, always) = (densities_of(10_000, false), densities_of(1_000, true));
        assert!(never(0) * 2.0 < always(0), "{} {}", never(0), always(0));
    }

    /// By hand, of one bucket that all reach and half are asked for in: `1 - S = 1/2`, over a width
    /// of 1 and a mean of 3/4 that wait.
    #[test]
    fn a_density_is_hits_over_the_time_that_they_cost() {
        let mut hazards = [0.0; BUCKETS];
        hazards[0] = 0.5;
        assert_eq!(densities(&hazards)[0], 0.5 / 0.75);
        assert_eq!(densities(&hazards)[1], 0.0);
    }
}
