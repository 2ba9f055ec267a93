//! What the operating system knows of this process.

/// The most memory this process ever had, for people to read.
pub(crate) fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.map_or_else(|| "unknown".into(), |peak| peak.trim().into())
}
