"""Pure domain: values, rules and decisions. No I/O, no await, no clock; time is an argument."""
