"""Device opens as they happen: the eBPF probes, their loader, the decoded events, the fallback."""
