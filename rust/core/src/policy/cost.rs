//! What a prefill costs.

/// What it costs to compute a prompt: a part that grows with its tokens, and a part of attention
/// that grows with their square. Only the ratio of the two decides anything.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    linear: f64,
    quadratic: f64,
}

impl Cost {
    /// `linear * tokens + quadratic * tokens^2`, in FLOPs or any other unit.
    ///
    /// # Panics
    /// If a weight is negative or not finite, or both are zero.
    pub fn new(linear: f64, quadratic: f64) -> Self {
        let sound = |weight: f64| weight.is_finite() && weight >= 0.0;
        assert!(
            sound(linear) && sound(quadratic) && linear + quadratic > 0.0,
            "weights of a cost are finite, not negative and not both zero, got {linear} and {quadratic}"
        );
        Self { linear, quadratic }
    }

    /// The same cost counted in units of `tokens` tokens.
    #[must_use]
    pub fn per(self, tokens: u32) -> Self {
        let tokens = f64::from(tokens);
        Self::new(self.linear * tokens, self.quadratic * tokens * tokens)
    }

    /// Cost of the first `depth` tokens.
    pub fn of(self, depth: usize) -> f64 {
        let depth = depth as f64;
        depth * (self.linear + self.quadratic * depth)
    }
}

/// 6.6e9 and 98,304 FLOPs: a mixture of experts with 3.3e9 active parameters of which 12 layers
/// have full attention, such as Qwen3-Next-80B-A3B.
impl Default for Cost {
    fn default() -> Self {
        Self::new(6.6e9, 98_304.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_a_prompt_does_not_depend_on_its_unit() {
        let cost = Cost::default();
        assert_eq!(cost.of(1_000), 6.6e12 + 98_304e6);
        assert_eq!(cost.per(512).of(20), cost.of(20 * 512));
    }

    #[test]
    #[should_panic(expected = "not both zero, got 0 and 0")]
    fn a_cost_of_nothing_is_refused() {
        Cost::new(0.0, 0.0);
    }
}
