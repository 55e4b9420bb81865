"""A prediction, never a measurement: the operation's time on Macs if memory were its only limit.

    python benchmarks/predict_metal.py

bytes / bandwidth + dispatches x 3 us, at (B, K, V) = (1, 4, 152064). Bytes and dispatches are those
that the simulator counts (docs/metal.md); bandwidths are Apple's technical specifications, of the
largest variant of a chip; the cost of a dispatch is assumed.
"""

from __future__ import annotations

DISPATCH_SECONDS = 3e-6
ROW = 152064 * 4  # bytes, float32
# Name, rows that must be read, bytes over those, dispatches.
CALLS = [
    ("temperature, dense", 9, 1.23, 3),
    ("temperature, one-hot", 5, 1.01, 2),
    ("top_k 20 + top_p 0.9, dense", 9, 1.32, 4),
]
# GB/s
BANDWIDTH = {
    "M1": 68,
    "M1 Pro": 200,
    "M1 Max": 400,
    "M1 Ultra": 800,
    "M2": 100,
    "M2 Pro": 200,
    "M2 Max": 400,
    "M2 Ultra": 800,
    "M3": 100,
    "M3 Pro": 150,
    "M3 Max": 400,
    "M3 Ultra": 819,
    "M4": 120,
    "M4 Pro": 273,
    "M4 Max": 546,
    "M5": 153,
    "M5 Pro": 307,
    "M5 Max": 614,
}


def microseconds(rows: int, ratio: float, dispatches: int, bandwidth: float) -> float:
    return 1e6 * (rows * ROW * ratio / (bandwidth * 1e9) + dispatches * DISPATCH_SECONDS)


def main() -> None:
    names = [f"{name}, {dtype}" for name, *_ in CALLS for dtype in ("f32", "bf16")]
    print("| chip | GB/s |", " | ".join(names), "|")
    print("|---|---|" + "---|" * len(names))
    for chip, bandwidth in BANDWIDTH.items():
        times = [
            microseconds(rows / share, ratio, dispatches, bandwidth)
            for _, rows, ratio, dispatches in CALLS
            for share in (1, 2)
        ]
        print(f"| {chip} | {bandwidth} |", " | ".join(f"{time:.0f}" for time in times), "|")


if __name__ == "__main__":
    main()
