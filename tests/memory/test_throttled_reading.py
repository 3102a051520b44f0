"""Costly readings are rare, cheap ones follow their interval."""

from steadyrl.memory.throttled_reading import ThrottledReading


def test_costly_readings_are_throttled(clock):
    calls = []

    def read():
        clock.now += 0.1
        calls.append(clock.now)
        return len(calls)

    reading = ThrottledReading(read, every_seconds=10, clock=clock, effort=clock)
    assert reading.value == 1 and not reading.poll()
    clock.now += 39  # more than every_seconds, less than 400 times the cost of a reading
    assert not reading.poll() and reading.value == 1
    clock.now += 2
    assert reading.poll() and reading.value == 2


def test_the_cost_of_a_reading_is_cpu_time(clock):
    def read():
        clock.now += 5  # of wall time, with hardly any CPU time

    reading = ThrottledReading(read, every_seconds=10, clock=clock)
    clock.now += 10
    assert reading.poll()


def test_cheap_readings_follow_their_interval(clock):
    rare = ThrottledReading(lambda: clock.now, every_seconds=10, clock=clock)
    always = ThrottledReading(lambda: clock.now, every_seconds=0, clock=clock)
    clock.now = 9.0
    assert not rare.poll() and always.poll()
    clock.now = 10.0
    assert rare.poll() and rare.value == 10.0
