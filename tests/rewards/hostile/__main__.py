from tests.rewards.hostile.report import main

main()
