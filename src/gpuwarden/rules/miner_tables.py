"""What is known of miners and of the programs that look like them, as plain tables.

Names and options come from the programs' own published help texts and read-me files; pool domains
from public block lists; address shapes from the coins' own specifications. Nothing here judges:
``miner_signs`` does. Everything is in lower case unless said otherwise.
"""

from __future__ import annotations

from typing import Literal

from gpuwarden.pattern import pattern

PoolFlag = Literal["pool", "soft"]
AccountFlag = Literal["wallet", "user", "worker"]

# --- Program names. A key is the name without its separators; see miner_names.known_name. ---------

# Miners by their released binaries' names (GitHub releases, public detection rules).
MINERS: dict[str, str] = {
    name.replace("-", "").replace("_", "").replace(".", ""): name
    for name in (
        *("xmrig", "xmrig-proxy", "xmrigcc", "xmrigdaemon", "xmr-stak", "xmr-stak-rx"),
        *("minerd", "minergate", "minergate-cli", "cpuminer", "cpuminer-opt", "cpuminer-gr"),
        *("ccminer", "ethminer", "cgminer", "bfgminer", "sgminer", "bosminer", "nsgminer"),
        *("claymore", "ethdcrminer", "nsgpucnminer", "zecminer", "nheqminer", "ewbf", "nsfminer"),
        *("nbminer", "t-rex", "gminer", "lolminer", "phoenixminer", "teamredminer", "nanominer"),
        *("bminer", "wildrig", "srbminer", "rigel", "bzminer", "onezerominer", "kbminer"),
        *("kawpowminer", "progpowminer", "progminer", "serominer", "zilminer", "energiminer"),
        *("cryptodredge", "z-enemy", "teamblackminer", "hellminer", "astrominer", "tnn-miner"),
        *("dero-miner", "deroluna", "kaspa-miner", "spectre-miner", "karlsen-miner", "p2pool"),
        *("moneroocean_miner", "c3pool_miner", "nicehashminer", "nicehashquickminer", "multiminer"),
        *("rgminer", "soat-miner", "pearlminer", "pearl-miner", "qli-client", "qli-runner"),
        *("xmrig-mo", "xmrig-nvidia", "xmrig-amd", "cryptonight-miner", "jceminer", "finminer"),
        *("quaiminer", "quai-gpu-miner", "firominer", "ubqminer", "etcminer", "beamminer"),
    )
}

# Names under which mining malware was described in public incident reports.
MALWARE: dict[str, str] = {
    name: name
    for name in (
        *("kdevtmpfsi", "kinsing", "kthreaddi", "kthrotlds", "sysrv", "sysrvv", "watchbog"),
        *("systemmd", "networkservicesysguard"),
    )
}

# Words that follow a name in released binaries and archives: platform, build, device.
NAME_SUFFIXES = frozenset(
    "exe bin elf run linux lin linux64 lin64 win win64 windows macos darwin x64 x86 amd64 arm64 "
    "aarch64 static musl glibc notls tls multi cuda cuda8 cuda9 cuda10 cuda11 cuda12 cuda13 "
    "opencl cl cpu gpu nvidia amd intel avx avx2 avx512 sse2 sse42 aes sha zen zen2 zen3 zen4 "
    "opt rx mo hiveos hive bionic focal jammy noble gcc release final beta rc old bak new custom "
    "daemon d gnu ubuntu debian alpine docker latest 64 32 free client miner".split()
)
VERSION_WORD = pattern(r"v?\d{1,6}[a-z]{0,2}\d{0,3}")

# Names that a miner has and that other programs have as well: they say little by themselves.
AMBIGUOUS_NAMES = frozenset(
    {"miner", "miniz", "kan", "trex", "soat", "tbm", "mm", "ethminers", "mining"}
)
# English words and tools that end in "miner" without mining a coin.
NOT_MINERS = frozenset(
    "examiner determiner rapidminer dataminer textminer processminer prom repominer lexminer "
    "minerl mineral contaminer streamminer patternminer geneminer variantminer".split()
)

# Cisco's TRex traffic generator and its tools: not T-Rex, the miner.
CISCO_TREX = pattern(r"_?t-rex-64(?:-debug|-o|-debug-o)?(?:\.exe)?")
CISCO_TREX_FLAGS = frozenset({"--cfg", "--iom", "--astf", "--stl", "--lro-disable", "-i"})

# Password recovery and key search. Options of hashcat: hashcat.net/wiki.
HASH_CRACKERS: dict[str, str] = {
    "hashcat": "hashcat", "oclhashcat": "hashcat", "cudahashcat": "hashcat", "hashcat64": "hashcat",
    "john": "John the Ripper", "vanitysearch": "VanitySearch", "keyhunt": "keyhunt",
    "bitcrack": "BitCrack", "cubitcrack": "BitCrack", "clbitcrack": "BitCrack", "pyrit": "Pyrit",
    "rcrack": "RainbowCrack", "rcrackicuda": "RainbowCrack", "vanitygen": "vanitygen",
    "oclvanitygen": "vanitygen", "profanity2": "profanity",
    "keyhuntcuda": "keyhunt", "hashtopolis": "Hashtopolis",
    "hashtopolisagent": "Hashtopolis", "aircrackng": "aircrack-ng",
}  # fmt: skip
HASH_MASK = pattern(r"(?:\?[ludsabhHLU1-4]){3,}")

# Volunteer computing: foldingathome.org, boinc.berkeley.edu, mersenne.org.
VOLUNTEERS: dict[str, str] = {
    "fahclient": "Folding@home", "fahcorewrapper": "Folding@home", "fahcontrol": "Folding@home",
    "boinc": "BOINC", "boincclient": "BOINC", "boincmgr": "BOINC", "boinccmd": "BOINC",
    "gpuowl": "GIMPS", "prpll": "GIMPS", "mfaktc": "GIMPS", "mfakto": "GIMPS",
}  # fmt: skip
VOLUNTEER_PREFIXES: dict[str, str] = {
    "fahcore": "Folding@home", "setiathome": "SETI@home", "einsteinbinary": "Einstein@Home",
    "hsgamma_": "Einstein@Home", "primegrid_": "PrimeGrid", "milkyway_": "MilkyWay@home",
    "wcgrid_": "World Community Grid",
}  # fmt: skip
VOLUNTEER_PATHS: dict[str, str] = {
    "cores.foldingathome.org/": "Folding@home", "/core_2": "Folding@home",
    "/boinc-client/projects/": "BOINC", "/boinc/projects/": "BOINC",
}  # fmt: skip

# Proof of space: plotting and farming (chia.net, spacemesh.io and the plotters' read-me files).
PLOTTERS: dict[str, str] = {
    "chia": "Chia", "chiaharvester": "Chia", "chiafarmer": "Chia", "chiafullnode": "Chia",
    "chiaplotter": "Chia", "chiadaemon": "Chia", "chiawallet": "Chia", "bladebit": "Bladebit",
    "chiatimelordlauncher": "Chia", "bladebitcuda": "Bladebit", "bladebitharvester": "Bladebit",
    "chiaplot": "MadMax", "chiaplotk34": "MadMax", "cudaplotk32": "Gigahorse",
    "cudaplotk32v3": "Gigahorse", "cudaplotk33": "Gigahorse", "cudaplotk34": "Gigahorse",
    "chiarecomputeserver": "Gigahorse", "drplotter": "DrPlotter", "drsolver": "DrPlotter",
    "postcli": "Spacemesh", "gpupost": "Spacemesh", "gospacemesh": "Spacemesh",
}  # fmt: skip

# --- Options. Short options keep their case. ------------------------------------------------------

# Where a pool's address stands. "pool": few other programs take host:port there; "soft": many do.
POOL_FLAGS: dict[str, PoolFlag] = {
    **dict.fromkeys(("-o", "-o1", "-o2", "-o3", "-do", "--pool", "-pool", "-pool2"), "pool"),
    **dict.fromkeys(("--pool1", "--pool2", "-pool1", "-epool", "-zpool", "-dpool"), "pool"),
    **dict.fromkeys(("--dualpool", "--dual-pool", "--stratum", "--pool-url", "-xpool"), "pool"),
    **dict.fromkeys(("--pool-address", "--mining-pool", "--zil-pool", "--a1-pool"), "pool"),
    **dict.fromkeys(("--url", "-url", "--url2", "--url3", "-P", "-p", "-s", "--server"), "soft"),
    **dict.fromkeys(("-server", "--uri", "-uri", "--zilserver", "--dserver"), "soft"),
}
PORT_FLAGS = frozenset({"--port", "-port", "-n", "--server-port"})
"""GMiner and miniZ take the pool's port apart from its host."""

ACCOUNT_FLAGS: dict[str, AccountFlag] = {
    **dict.fromkeys(("--wallet", "-wallet", "-wal", "-ewal", "-zwal", "-dwal"), "wallet"),
    **dict.fromkeys(("--coinbase-addr", "--wallet-address", "--dualwallet"), "wallet"),
    **dict.fromkeys(("-u", "-u1", "-u2", "-du", "--user", "-user", "--user2"), "user"),
    **dict.fromkeys(("--username", "--login", "--userpass", "--ziluser", "--dualuser"), "user"),
    **dict.fromkeys(("-w", "--worker", "-worker", "-eworker", "--worker-name"), "worker"),
    **dict.fromkeys(("--rig-id", "--rigname", "-rigname", "--rig", "--workername"), "worker"),
}
ALGORITHM_FLAGS = frozenset(
    "-a --algo -algo --algorithm -algorithm --dual-algo --dualmode --dalgo -dalgo".split()
)
COIN_FLAGS = frozenset({"--coin", "-coin", "--currency", "-dcoin", "--dual-coin"})
PASSWORD_FLAGS = frozenset({"-p", "--pass", "--password", "-pass", "-epsw", "-zpsw", "--psw"})

# Options that no other kind of program is known to have, and whose they are.
MINER_FLAGS: dict[str, str] = {
    flag: owner
    for owner, flags in (
        (
            "XMRig",
            "--donate-level --donate-over-proxy --randomx-1gb-pages --randomx-init --randomx-mode "
            "--randomx-no-numa --randomx-wrmsr --randomx-no-rdmsr --randomx-cache-qos "
            "--cpu-max-threads-hint --cuda-bfactor-hint --cuda-bsleep-hint --api-worker-id "
            "--daemon-poll-interval --hugepages-jit",
        ),
        ("XMRig or SRBMiner", "--nicehash"),
        (
            "T-Rex",
            "--lhr-tune --dag-build-mode --keep-gpu-busy --extra-dag-epoch --gpu-report-interval "
            "--back-to-main-pool-sec --validate-shares",
        ),
        ("lolMiner", "--ethstratum --lhrtune --dualuser --mode-lhr"),
        ("Rigel", "--zil-countdown --dag-reset-mclock"),
        ("TeamRedMiner", "--eth_config --eth_stratum_mode --eth_aggr_mode"),
        ("ethminer", "--farm-recheck --cuda-parallel-hash --report-hashrate"),
        ("WildRig", "--opencl-launch --opencl-threads"),
        ("PhoenixMiner", "-ewal -epool -eworker -epsw -allpools -rvram"),
        ("a GPU miner", "--mallob-endpoint --pearlhash --zilserver --dag_mode"),
        ("an Equihash miner", "--pers"),
        ("cpuminer", "--no-longpoll --no-getwork --coinbase-addr"),
        ("xmr-stak", "--nocpu --noamd --nonvidia --poolconf"),
    )
    for flag in flags.split()
}

# --- Algorithms (the miners' own lists). ----------------------------------------------------------

ALGORITHMS = frozenset(
    "ethash etchash ethashb3 kawpow kawpow2 meowpow evrprogpow firopow progpow progpowz "
    "progpowsero progpowveil vprogpow autolykos autolykos2 autolykosv2 kheavyhash heavyhash "
    "karlsenhash karlsenhashv2 pyrinhash pyrinhashv2 sha512256d nexapow xelishash xelishashv2 "
    "xelishashv2pepew xelishashv3 pearlhash pearlpow verushash randomx randomwow randomarq "
    "randomyada randomkeva beamhash beamhashii beamhashiii cuckoo29 cuckaroo29 cuckarood29 "
    "cuckaroom29 cuckatoo31 cuckatoo32 cuckoocycle mtptcr lyra2v2 lyra2rev2 lyra2rev3 lyra2z "
    "lyra2z330 lyra2re phi1612 x11gost x15 x16r x16rv2 x16rt x16s x17 x21s x22i x25x "
    "timetravel10 skunkhash neoscrypt neoscryptxaya sha256csm sha256dt yescryptr16 yescryptr32 "
    "yespower yespowerr16 power2b cpupower minotaurx balloonzentoshi argon2chukwa argon2idninja "
    "dynexsolve memehash hoohash walahash fishhash ironfishhash janushash astrobwt astrobwtdero "
    "spectrex blake3alph blake3decred ethashdag ubqhash hmq1725 skein2 wildkeccak qhash".split()
)
ALGORITHM_PREFIXES = (
    *("rx/", "cn/", "cnlite/", "cnheavy/", "cnpico/", "argon2/", "cryptonight", "equihash"),
)
# Also names of methods, hashes, tools or plain words: they count only beside a pool.
AMBIGUOUS_ALGORITHMS = frozenset(
    "pearl blake3 blake2s blake2b scrypt sha256 sha256d sha3 sha3d keccak x11 x13 x14 skein "
    "groestl quark nexa zil lyra2 argon2d argon2id nist5 c11 phi phi2 bmw zelhash zhash tensor "
    "aleo alephium kaspa dag veil cuckoo handshake eaglesong tellor decred qubit myrgr octopus "
    "verus ghostrider mike flex panthera allium cortex aeternity mtp honeycomb tribus dynex "
    "warthog radiant pyrin yescrypt chukwa curvehash skydoge bcd glt 0x10 argon2dynamic".split()
)
# Coins, as their miners' --coin option takes them.
COINS = frozenset(
    "monero xmr eth etc rvn ravencoin erg ergo cfx conflux kas kaspa ctxc cortex beam grin ae "
    "flux zec zel btg zen alph nexa rxd dnx clore neox neoxa xna firo evr kls pyi xel prl pearl "
    "wow arq zeph zephyr dero vrsc verus rtm raptoreum zano sero ethw octa quai".split()
)

# --- Pools. ---------------------------------------------------------------------------------------

# Schemes that only mining protocols have. <algorithm>:// is bminer's.
POOL_SCHEMES = frozenset(
    "ethproxy ethnh ethstratum ethash equihash zhash kawpow cuckatoo32 ethproxy+tcp ethproxy+ssl "
    "ethnh+tcp ethnh+ssl ethstratum+tcp ethstratum+ssl ethstratum2+tcp ethstratum2+ssl "
    "nicehash+tcp nicehash+ssl xnsub+tcp daemon+http daemon+https".split()
)
STRATUM_SCHEME = pattern(r"stratum[123]?(?:\+(?:tcp|ssl|tls|tls12|udp|ws|wss|http|tcps))?")
PLAIN_SCHEMES = frozenset({"tcp", "ssl", "tls", "tcp+tls", "udp"})
WEB_SCHEMES = frozenset({"http", "https"})

# Registered domains of public pools (public block lists), to compare with, never to resolve.
POOL_DOMAINS = frozenset(
    "nanopool.org minexmr.com supportxmr.com hashvault.pro moneroocean.stream c3pool.com "
    "c3pool.org 2miners.com f2pool.com antpool.com ethermine.org ethpool.org dwarfpool.com "
    "slushpool.com unmineable.com herominers.com xmrpool.eu xmrpool.net minergate.com "
    "luckpool.net kryptex.network nicehash.com woolypooly.com flexpool.io zergpool.com "
    "rplant.xyz k1pool.com magicpool.co poolbinance.com pearlfortune.org pearlhash.xyz "
    "miningpoolhub.com zpool.ca prohashing.com viabtc.com poolin.com sparkpool.com hiveon.net "
    "hiveon.com ezil.me flypool.org icemining.ca cruxpool.com suprnova.cc mining-dutch.nl "
    "monerohash.com skypool.org crazypool.org humpool.com acc-pool.pw nomp.site crypto-pool.fr "
    "monerpool.org pool.binance.com".split()
)

# Environment variables of public miner images.
POOL_URL_VARIABLES = frozenset({"POOL_URL", "POOL_ADDRESS", "POOL_HOST", "MINING_POOL"})
POOL_USER_VARIABLES = frozenset({"POOL_USER", "WALLET", "WALLET_ADDRESS", "POOL_WALLET"})
# A POOL_URL on one of these is a database's (PostgreSQL, pgbouncer, pgpool, MySQL…).
DATABASE_PORTS = frozenset({1521, 3306, 5432, 5433, 6033, 6379, 6432, 9999, 27017})

# Address shapes: Monero, Bitcoin, then coins that write a prefix.
WALLET = pattern(
    r"[48][1-9A-HJ-NP-Za-km-z]{94}(?:[1-9A-HJ-NP-Za-km-z]{11})?"
    r"|bc1[02-9ac-hj-np-z]{25,71}"
    r"|(?=[^a-z]{0,9}[a-z])(?=[^A-Z]{0,9}[A-Z])"  # mixed case: no hexadecimal token
    r"(?:[13][1-9A-HJ-NP-Za-km-z]{25,34}|[RtD][1-9A-HJ-NP-Za-km-z]{33,34})"
    r"|9[1-9A-HJ-NP-Za-km-z]{50}"
    r"|(?:prl1|zil1|dero1|nim1|fb1|grin1)[0-9A-Za-z]{6,120}"
    r"|(?:cfx|kaspa|nexa|pyrin|karlsen|spectre|xel|hoosat|bugna|astrix|NEXA|CFX):[0-9A-Za-z]{20,120}"
    r"|(?:EQ|UQ)[0-9A-Za-z_-]{46}"
)

# Common in honest programs that read a chain: a wallet, but no sign by itself.
CHAIN_ADDRESS = pattern(r"0x[0-9a-fA-F]{40}(?:[./+:].{0,64})?")

# --- Programs whose arguments are data, not their own mining. -------------------------------------

READERS = frozenset(
    "grep egrep fgrep zgrep rg ag ack sed awk gawk mawk vim vi nvim view nano emacs less more "
    "most cat tac bat head tail echo printf yara ps top htop pgrep pkill pidof kill killall "
    "journalctl git gh hg svn pip pip3 pipx uv apt apt-get apt-cache aptitude dpkg dpkg-query "
    "rpm yum dnf zypper pacman apk snap brew npm cargo man info which whereis type find fd "
    "locate ls dir stat file strings nm objdump readelf md5sum sha1sum sha256sum sha512sum cksum "
    "chmod chown chattr lsattr cp mv rm ln mkdir rmdir touch tee tar zip unzip gzip gunzip xz "
    "zstd 7z diff cmp sort uniq cut tr wc jq yq scp sftp rsync ssh systemctl service tcpdump "
    "tshark suricata snort zeek iptables ip6tables nft ufw firewall-cmd logger gdb gcc g++ cc "
    "c++ clang clang++ nvcc make cmake ninja docker podman nerdctl kubectl helm crictl ctr oc "
    "squeue sacct scancel scontrol sbatch crontab update-rc.d aws gcloud ansible clamscan "
    "rkhunter chkrootkit falco trivy lsof fuser nvidia-smi nvtop code test [ export set alias "
    "read inotifywait sqlite3 psql mysql".split()
)
# Programs that reach an address for a person: a pool's domain there is a weak sign.
NETWORK_CLIENTS = frozenset(
    "curl wget aria2c nc ncat netcat telnet openssl ping dig nslookup host whois traceroute mtr "
    "nmap http httpie socat".split()
)
SCRIPT_ENDINGS = (
    *(".py", ".sh", ".pl", ".rb", ".js", ".ipynb", ".json", ".yaml", ".yml", ".toml", ".txt"),
    *(".conf", ".cfg", ".ini", ".log", ".csv", ".parquet", ".pt", ".bin", ".jar", ".lua", ".r"),
)

# Letters of other alphabets that look like Latin ones.
LOOK_ALIKES = str.maketrans("аеіјорсухѕԁһӏոԝαοιν", "aeijopcyxsdhlnwaoiv")  # noqa: RUF001
INVISIBLE = pattern(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff]+"
)
