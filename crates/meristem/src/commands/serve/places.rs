//! Limits on the number of connections and live streams, in total and per address.
//!
//! A new connection gets a place. If its address has no place left, a connection of this address is
//! closed; if no address has one left, one of the address with the most, or else of any. It is the
//! connection that has been idle longest, or else one whose response takes longer than
//! [`TAKING_TIME`]. So a slow client does not keep others out. Live streams have separate places,
//! so they cannot use up the places of pages.
//!
//! Behind a proxy all connections have the proxy's address. Then no limit applies per address, and
//! each connection has a separate [`JobLock`]. `X-Forwarded-For` is not trusted: any client can
//! send it.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::work::JobLock;

/// Numbers of places, in total and per address.
struct Limit {
    all: usize,
    each: usize,
}

impl Limit {
    /// Limit of one address.
    fn of_address(&self, is_proxied: bool) -> usize {
        if is_proxied { self.all } else { self.each }
    }
}

/// Places of connections other than live streams. With live streams and open files, the total stays
/// below the usual limit of 1,024 open files.
const PAGES: Limit = Limit { all: 512, each: 256 };
/// Places of live streams.
const LIVE: Limit = Limit { all: 256, each: 128 };
/// Time of a response after which its connection may be closed for a new one.
const TAKING_TIME: Duration = Duration::from_secs(90);

/// Current use of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionUse {
    /// It is idle, or reads a request.
    Waits,
    /// It sends a response.
    Answers,
    /// It sends a live stream.
    Live,
}

struct Place {
    address: IpAddr,
    now: ConnectionUse,
    since: Instant,
    end: Arc<Notify>,
}

/// All places in use.
#[derive(Default)]
pub(super) struct Places {
    taken: Mutex<Taken>,
    /// Whether clients connect through a proxy.
    is_proxied: bool,
}

#[derive(Default)]
struct Taken {
    places: HashMap<u64, Place>,
    next: u64,
    /// Locks by address; a lock exists while a connection or a job of the address has it.
    job_locks: HashMap<IpAddr, Weak<tokio::sync::Mutex<()>>>,
}

/// Permit of one connection to use a place. Dropping it releases the place.
pub(super) struct ConnectionPermit {
    places: Arc<Places>,
    number: u64,
    end: Arc<Notify>,
    job_lock: JobLock,
}

/// Guard that marks a connection as answering; dropped at the end of the response.
pub(super) struct Answering(Arc<ConnectionPermit>);

/// The part of an address that a client cannot choose: the whole IPv4 address, the /64 network of
/// IPv6.
fn owner(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address => address,
    }
}

impl Places {
    /// Places of a server, which may be behind a proxy.
    pub(super) fn new(is_proxied: bool) -> Self {
        Self { is_proxied, ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a new connection. `None` if no place is free, and none can be freed
    /// because all connections are answering, none for [`TAKING_TIME`] yet. If the address is at
    /// its limit, only the place of a connection from the same address can be freed.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Arc<ConnectionPermit>> {
        let address = owner(address);
        let mut taken = self.lock();
        let number = taken.next;
        taken.next += 1;
        if taken.pages(Some(address)) >= PAGES.of_address(self.is_proxied) {
            taken.free(Some(address))?;
        } else if taken.pages(None) >= PAGES.all {
            let most = taken.most();
            // All connections of the address with the most may be answering.
            taken.free(most).or_else(|| taken.free(None))?;
        }
        let end = Arc::new(Notify::new());
        let place =
            Place { address, now: ConnectionUse::Waits, since: Instant::now(), end: end.clone() };
        taken.places.insert(number, place);
        let job_lock = if self.is_proxied { JobLock::default() } else { taken.job_lock(address) };
        Some(Arc::new(ConnectionPermit { places: self.clone(), number, end, job_lock }))
    }
}

impl Taken {
    /// Returns the lock that all jobs of an address share.
    fn job_lock(&mut self, address: IpAddr) -> JobLock {
        self.job_locks.retain(|_, job_lock| job_lock.strong_count() > 0);
        if let Some(job_lock) = self.job_locks.get(&address).and_then(Weak::upgrade) {
            return job_lock;
        }
        let job_lock = JobLock::default();
        self.job_locks.insert(address, Arc::downgrade(&job_lock));
        job_lock
    }

    /// Number of connections of an address, or of all, without live streams.
    fn pages(&self, address: Option<IpAddr>) -> usize {
        let counts = |place: &&Place| {
            place.now != ConnectionUse::Live
                && address.is_none_or(|address| place.address == address)
        };
        self.places.values().filter(counts).count()
    }

    /// The address with the most connections, without live streams.
    fn most(&self) -> Option<IpAddr> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for place in self.places.values().filter(|place| place.now != ConnectionUse::Live) {
            *counts.entry(place.address).or_default() += 1;
        }
        counts.into_iter().max_by_key(|(address, count)| (*count, *address)).map(|most| most.0)
    }

    /// Closes one connection, of an address or of any: the connection that has been idle longest,
    /// or else one whose response takes too long. `None` if there is none.
    fn free(&mut self, address: Option<IpAddr>) -> Option<()> {
        let may_end = |(_, place): &(&u64, &Place)| {
            let is_slow =
                place.now == ConnectionUse::Answers && place.since.elapsed() >= TAKING_TIME;
            let is_of = address.is_none_or(|address| place.address == address);
            is_of && (place.now == ConnectionUse::Waits || is_slow)
        };
        let order = |(number, place): &(&u64, &Place)| {
            (place.now == ConnectionUse::Answers, place.since, **number)
        };
        let number = *self.places.iter().filter(may_end).min_by_key(order)?.0;
        self.places.remove(&number)?.end.notify_one();
        Some(())
    }

    fn set(&mut self, number: u64, now: ConnectionUse) {
        if let Some(place) = self.places.get_mut(&number) {
            (place.now, place.since) = (now, Instant::now());
        }
    }
}

impl ConnectionPermit {
    /// The lock of the connection's address; behind a proxy, the lock of this connection only.
    pub(super) fn job_lock(&self) -> JobLock {
        self.job_lock.clone()
    }

    /// Waits until the place is assigned to another connection.
    pub(super) async fn is_lost(&self) {
        self.end.notified().await;
    }

    /// Marks the connection as answering a request.
    pub(super) fn answers(self: &Arc<Self>) -> Answering {
        self.places.lock().set(self.number, ConnectionUse::Answers);
        Answering(self.clone())
    }

    /// Takes a place of a live stream until the end of the response. False if none is free.
    pub(super) fn goes_live(&self) -> bool {
        let mut taken = self.places.lock();
        let Some(address) = taken.places.get(&self.number).map(|place| place.address) else {
            return false;
        };
        let live = || taken.places.values().filter(|place| place.now == ConnectionUse::Live);
        let own = live().filter(|place| place.address == address).count();
        let is_free = live().count() < LIVE.all && own < LIVE.of_address(self.places.is_proxied);
        if is_free {
            taken.set(self.number, ConnectionUse::Live);
        }
        is_free
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.places.lock().places.remove(&self.number);
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.places.lock().set(self.0.number, ConnectionUse::Waits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn is_in(places: &Places, permit: &ConnectionPermit) -> bool {
        places.lock().places.contains_key(&permit.number)
    }

    #[test]
    fn the_longest_idle_connection_is_closed_for_a_new_one_of_its_address() {
        let places = Arc::new(Places::default());
        let other = places.enter(address(2)).unwrap();
        let answering = places.enter(address(1)).unwrap();
        let mark = answering.answers();
        let slow: Vec<Arc<ConnectionPermit>> =
            (0..600).map(|_| places.enter(address(1)).unwrap()).collect();
        assert_eq!(places.lock().pages(Some(address(1))), PAGES.each);
        assert!(!is_in(&places, &slow[0]) && is_in(&places, &slow[599]));
        assert!(is_in(&places, &other) && is_in(&places, &answering));
        // The other half of the places is for other addresses.
        let more = (3..=254).map(|last| places.enter(address(last)).unwrap());
        let more: Vec<Arc<ConnectionPermit>> = more.collect();
        assert!(more.iter().all(|permit| is_in(&places, permit)));
        drop(mark);
        drop(slow);
        drop(more);
        assert_eq!(places.lock().places.len(), 2);
    }

    #[test]
    fn all_places_together_have_a_limit() {
        let places = Arc::new(Places::default());
        let permits = (0..2000u32).map(|number| {
            let [_, _, a, b] = number.to_be_bytes();
            places.enter([10, 0, a, b].into()).unwrap()
        });
        let permits: Vec<Arc<ConnectionPermit>> = permits.collect();
        assert_eq!(places.lock().places.len(), PAGES.all);
        assert!(is_in(&places, &permits[1999]));
        let mut answering = vec![];
        let busy = Arc::new(Places::default());
        while let Some(permit) = busy.enter(address(1)) {
            answering.push(permit.answers());
        }
        assert_eq!(answering.len(), PAGES.each, "no answering connection is closed");
        assert!(busy.enter(address(2)).is_some());
    }

    #[test]
    fn streams_do_not_take_places_of_pages() {
        let places = Arc::new(Places::default());
        let mut streams = vec![];
        for number in 0..1000 {
            let permit = places.enter(address(1)).unwrap();
            let mark = permit.answers();
            if !permit.goes_live() {
                assert_eq!(number, LIVE.each);
                break;
            }
            streams.push(mark);
        }
        assert_eq!(places.lock().pages(None), 0);
        let permit = places.enter(address(2)).unwrap();
        assert!(permit.goes_live(), "another address has other places");
        streams.pop();
        assert!(places.enter(address(1)).unwrap().goes_live(), "a place that was released");
    }

    #[test]
    fn streams_of_all_addresses_together_have_a_limit() {
        let places = Arc::new(Places::default());
        let addresses = (1..=3).flat_map(|last| vec![address(last); LIVE.each]);
        let permits: Vec<Arc<ConnectionPermit>> =
            addresses.map(|own| places.enter(own).unwrap()).collect();
        let live = permits.iter().filter(|permit| permit.goes_live()).count();
        assert_eq!(live, LIVE.all);
    }

    #[test]
    fn connections_of_an_address_share_a_lock_while_one_is_used() {
        let places = Arc::new(Places::default());
        let permits = [1, 1, 2].map(|last| places.enter(address(last)).unwrap());
        let [first, second, other] = permits.each_ref().map(|permit| permit.job_lock());
        assert!(Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&first, &other));
        drop(permits);
        assert!(Arc::ptr_eq(&first, &places.enter(address(1)).unwrap().job_lock()), "a job has it");
        drop((first, second, other));
        places.enter(address(3)).unwrap();
        assert_eq!(places.lock().job_locks.len(), 1);
    }

    /// All clients of a proxy have its address.
    #[test]
    fn behind_a_proxy_no_client_waits_for_the_lock_or_the_places_of_another() {
        let places = Arc::new(Places::new(true));
        let permits: Vec<Arc<ConnectionPermit>> =
            (0..PAGES.all).map(|_| places.enter(address(1)).unwrap()).collect();
        assert!(permits.iter().all(|permit| is_in(&places, permit)));
        assert!(!Arc::ptr_eq(&permits[0].job_lock(), &permits[1].job_lock()));
        let answering: Vec<Answering> = permits.iter().map(ConnectionPermit::answers).collect();
        let live = permits.iter().filter(|permit| permit.goes_live()).count();
        assert_eq!(live, LIVE.all);
        drop((permits, answering));
        assert!(places.lock().job_locks.is_empty());
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let of = |text: &str| owner(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }
}
