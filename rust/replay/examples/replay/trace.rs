//! Requests as they were recorded: JSON lines in the format of the Mooncake traces.

use std::fmt;
use std::io::BufRead;

use radixstate_replay::Recorded;
use serde::Deserialize;

#[derive(Deserialize)]
struct Line {
    /// Tokens of the prompt.
    input_length: usize,
    hash_ids: Vec<u32>,
}

/// A line that is not a request. The others still count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadLine {
    /// Counted from 1.
    pub(crate) line: usize,
    /// What is wrong with it; names the field.
    pub(crate) why: String,
}

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.why)
    }
}

/// The requests of a trace, in their order, and the lines that are none. Empty lines are nothing.
pub(crate) fn read(lines: impl BufRead) -> (Vec<Recorded>, Vec<BadLine>) {
    let mut requests = Vec::new();
    let mut bad = Vec::new();
    for (n, line) in lines.lines().enumerate() {
        let parsed = line
            .map_err(|error| error.to_string())
            .and_then(|line| parse(&line));
        match parsed {
            Ok(Some(request)) => requests.push(request),
            Ok(None) => {}
            Err(why) => bad.push(BadLine { line: n + 1, why }),
        }
    }
    (requests, bad)
}

fn parse(line: &str) -> Result<Option<Recorded>, String> {
    if line.trim().is_empty() {
        return Ok(None);
    }
    let Line {
        input_length,
        hash_ids,
    } = serde_json::from_str(line).map_err(|error| error.to_string())?;
    if input_length == 0 {
        return Err("input_length is 0, a prompt has at least 1 token".into());
    }
    Ok(Some(Recorded {
        tokens: input_length,
        blocks: hash_ids,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_line_names_its_field_and_the_rest_still_counts() {
        let text = "{\"input_length\": 600, \"hash_ids\": [1, 2]}\n\n{\"input_length\": 9}\n\
                    {\"input_length\": 0, \"hash_ids\": []}\n{\"input_length\": 513, \"hash_ids\": [4, 5]}\n";
        let (requests, bad) = read(text.as_bytes());
        let lengths: Vec<usize> = requests.iter().map(|request| request.tokens).collect();
        assert_eq!(lengths, [600, 513]);
        assert_eq!(bad.len(), 2);
        let words = bad[0].to_string();
        assert!(
            words.starts_with("line 3: missing field `hash_ids`"),
            "{words}"
        );
        assert!(bad[1].to_string().starts_with("line 4: input_length is 0"));
    }
}
